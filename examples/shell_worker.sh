#!/usr/bin/env bash
# A worker in bash: counts the words of files. It ends when no job has come for WAIT seconds.
#
#   holdfast enqueue words '{"file": "notes.txt"}' --id notes
#   bash shell_worker.sh
#   holdfast show words notes --payload
#
# Any program that can run `holdfast` can be such a worker. Work that may take longer than the lease (60 s here) must run
# `holdfast extend "$token"` in time.
set -euo pipefail

QUEUE=${QUEUE:-words}
WAIT=${WAIT:-30}
BACKOFF=${BACKOFF:-10}

# field NAME: a value of the JSON on stdin, with python where there is no jq. Fails if there is none.
if command -v jq > /dev/null; then
  field() { jq -er ".$1"; }
else
  field() { python3 -c 'import functools, json, sys
print(functools.reduce(dict.__getitem__, sys.argv[1].split("."), json.load(sys.stdin)))' "$1"; }
fi

# The work: reads the job, prints the result, as JSON. If it fails, what it printed is the reason.
count_words() {
  local file words
  file=$(field payload.file) || { echo "the payload names no file"; return 1; }
  words=$(cat -- "$file" | wc -w) && printf '{"words": %d}' "$words"
}

while true; do
  status=0
  job=$(holdfast lease "$QUEUE" --seconds 60 --wait "$WAIT" --max-stalls 3) || status=$?
  case $status in
    0) ;;
    4) echo "nothing more to do"; exit 0 ;;
    *) exit "$status" ;; # holdfast has said why
  esac

  token=$(field token <<< "$job")
  attempt=$(field attempt <<< "$job")
  if result=$(count_words <<< "$job" 2>&1); then
    settle=(complete -- "$token" "$result")
  else
    settle=(fail --retry --delay "$BACKOFF" --max-retries 2 -- "$token" "$result")
  fi
  # Not settled: the lease was lost, so another worker has the job. Go on with the next one.
  outcome=$(holdfast "${settle[@]}") || outcome="not settled"
  echo "$(field id <<< "$job"), attempt $attempt: $outcome"
done
