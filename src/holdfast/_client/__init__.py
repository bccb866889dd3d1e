"""What users hold: the app, tasks, queues, leases, and their blocking forms."""
