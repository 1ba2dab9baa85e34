#!/usr/bin/env bash
# Checks the model of the lease protocol, lease.pml, with spin: the true model
# keeps the promise in every state, each flaw breaks it. README.md says more.
#
#   internal/model/run.sh          all of it, under a minute on two cores
#   internal/model/run.sh deep     larger bounds of the true model as well
#   internal/model/run.sh RESEND   the shortest run in which a flaw breaks it
#
# REQUIRE_SPIN=1 makes it an error that spin or gcc is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
readonly MODEL=$PWD/lease.pml

# What must hold in every state, by bounds, and what else is switched on.
readonly PROOFS=(
  '2 tokens:'
  '2 tokens, 1 each 2 ticks: -DTOKEN=2'
  '2 tokens, TTL 3 ticks: -DTTL=3'
  '3 tokens, some kept: -DBURST=3 -DKEEP'
  '1 node, TTL 3 ticks, clock goes back: -DNODES=1 -DTTL=3 -DBACK'
)
readonly DEEP=(
  '3 tokens, 1 each 2 ticks, some kept: -DBURST=3 -DTOKEN=2 -DKEEP'
  '3 tokens, TTL 3 ticks: -DBURST=3 -DTTL=3'
  '3 nodes, 2 tokens: -DNODES=3'
  '2 tokens, clock goes back: -DBACK'
  '1 node, clock goes back, some kept: -DNODES=1 -DBURST=3 -DBACK -DKEEP'
)
# What must break the promise. One node suffices for each, the other being idle.
readonly FLAWS=(
  'UNCOUNTED: leases do not count against the burst:'
  'REPORT_FIRST: reports are applied before the refill:'
  'ROTATE_FIRST: an epoch is dropped before the refill up to its end: -DTTL=3 -DTOKEN=2'
  'DROP_EARLY: an epoch is dropped when it ends: -DTTL=3'
  'STALE_REPORT: reports of an epoch that was dropped count:'
  'EXPIRE_EARLY: the key expires while leases are out:'
  'DUPLICATE: a call is executed twice:'
  'RESEND: reports are sent again after an unknown outcome:'
  'FROM_RECEIPT: a deadline counts from the reply:'
  'LATE_REPLY: a reply is used after its deadline:'
  'RETURN_LATER: a token may be spent after it was returned:'
  'KEEP_ALL: a node keeps whatever was charged for nobody: -DBURST=3 -DKEEP'
  'KEEP_TTL: a node keeps what has room now, refill not counted: -DBURST=3 -DKEEP'
  'FOLD: the epoch goes back with the clock: -DTTL=3 -DBACK'
)

# --- tools --------------------------------------------------------------------

for tool in spin gcc; do
  if ! command -v "$tool" >/dev/null; then
    echo "model: no $tool, so the model is not checked: apt-get install -y spin gcc" >&2
    [[ ${REQUIRE_SPIN:-} != 1 ]] || exit 1
    exit 0
  fi
done

work=$(mktemp -d)
readonly work
cleanup() {
  local job
  for job in $(jobs -p); do
    kill -- "-$job" 2>/dev/null || true
  done
  rm -rf "$work"
}
trap cleanup EXIT
set -m # each job is a process group, so that none of its processes is left

# explore OUT CFLAGS SPINFLAGS… builds a checker and runs it in the directory
# OUT, leaving what it says in OUT/out.
explore() {
  local out=$1 cflags=$2
  shift 2
  mkdir -p "$out"
  cd "$out"
  # shellcheck disable=SC2086 # several flags
  spin -a "$@" "$MODEL" >&2 &&
    gcc -w $cflags -DSAFETY -DNOREDUCE -DMEMLIM=4000 -o pan pan.c &&
    ./pan -n -b -m2000000 -w22 >out 2>&1 # -b: a search that is cut short is an error
}

# told OUT PATTERN prints what stands before PATTERN in OUT/out.
told() { sed -n "s/^ *\([0-9.]*\) $2.*/\1/p" "$1/out"; }

# proof N 'NAME: FLAGS' checks one set of bounds.
proof() {
  local out=$work/$1 name=${2%:*} flags=${2##*:} seconds
  # shellcheck disable=SC2086 # several flags
  if (explore "$out" -O1 $flags) 2>"$out.err" && grep -q 'errors: 0$' "$out/out" &&
    ! grep -qE 'truncated|too small|out of memory|not completed' "$out/out"; then
    seconds=$(sed -n 's/^pan: elapsed time \([0-9.]*\).*/\1/p' "$out/out")
    printf '  %-38s %9d states, 0 errors, %s s\n' "$name" "$(told "$out" 'states, stored')" "${seconds:-0}"
    return
  fi
  printf '  %-38s FAILED\n' "$name"
  cat "$out.err"
  [[ ! -f $out/out ]] || grep -E '^pan|errors:' "$out/out"
  # Again, breadth first: the shortest run is easier to read.
  # shellcheck disable=SC2086 # several flags
  (explore "$out" '-O1 -DBFS' $flags) 2>/dev/null || true
  # shellcheck disable=SC2086 # several flags
  trace "$out" $flags
  return 1
}

# flaw N 'NAME: WHAT: FLAGS' checks that one flaw breaks the promise.
flaw() {
  local out=$work/$1 name=${2%%:*} what=${2#*: } flags=${2##*:}
  what=${what%:*}
  # shellcheck disable=SC2086 # several flags
  if (explore "$out" '-O0 -DBFS' -DPROMISE -DNODES=1 "-D$name" $flags) 2>"$out.err" &&
    grep -q 'assertion violated (level<=' "$out/out"; then
    printf '  %-13s %-58s broken after %d states\n' "$name" "$what" "$(told "$out" 'states, stored')"
    return
  fi
  printf '  %-13s %-58s SURVIVES: want the promise broken\n' "$name" "$what"
  cat "$out.err"
  [[ ! -f $out/out ]] || grep -E '^pan|errors:' "$out/out"
  return 1
}

# trace OUT SPINFLAGS… prints the run that OUT's checker found, if any.
trace() {
  local out=$1
  shift
  if [[ -f $out/lease.pml.trail ]]; then
    # Steps up to the failure, without spin's dump of all variables.
    spin -T -k "$out/lease.pml.trail" "$@" "$MODEL" | grep -E '^(store|node [0-9]|clock|    b )|assertion' | tail -n 200 || true
  fi
}

# --- one flaw -------------------------------------------------------------------

mode=${1:-all}
if [[ $mode != all && $mode != deep ]]; then
  for f in "${FLAWS[@]}"; do
    if [[ ${f%%:*} == "$mode" ]]; then
      flaw trace "$f"
      # shellcheck disable=SC2086 # several flags
      trace "$work/trace" -DPROMISE -DNODES=1 "-D$mode" ${f##*:}
      exit 0
    fi
  done
  echo "model: no flaw $mode; there are" "${FLAWS[@]%%:*}" >&2
  exit 2
fi

# --- all ------------------------------------------------------------------------

cores=$(getconf _NPROCESSORS_ONLN)
headings=() pids=() failed=0

# start FUNCTION HEADING ENTRY… starts a job for each entry, as many at a time
# as there are cores, at most four: each takes up to half a gigabyte.
start() {
  local function=$1 heading=$2 entry
  shift 2
  for entry; do
    while (($(jobs -rp | wc -l) >= (cores < 4 ? cores : 4))); do
      wait -n || true # whether it passed is looked at below
    done
    local n=${#pids[@]} # its number
    ("$function" "$n" "$entry" >"$work/$n.said" 2>&1 && touch "$work/$n.passed") &
    pids+=($!)
    headings+=("$heading")
    heading=
  done
}

spin -V
start proof 'Every state of the true model keeps the promise:' "${PROOFS[@]}"
if [[ $mode == deep ]]; then
  start proof 'And with larger bounds:' "${DEEP[@]}"
fi
start flaw 'Each flaw breaks it:' "${FLAWS[@]}"
for n in "${!pids[@]}"; do
  wait "${pids[n]}" 2>/dev/null || true
  [[ -z ${headings[n]} ]] || echo "${headings[n]}"
  cat "$work/$n.said"
  [[ -f $work/$n.passed ]] || failed=$((failed + 1))
done
if ((failed > 0)); then
  echo "model: $failed of ${#pids[@]} checks FAILED in $SECONDS s"
  exit 1
fi
echo "model: ${#pids[@]} checks passed in $SECONDS s"
