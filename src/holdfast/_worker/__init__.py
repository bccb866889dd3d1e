"""A worker: it claims jobs, runs them, keeps their leases alive and settles them."""
