#!/usr/bin/env bash
# Every check and every figure of the GPU devices, on a machine with a GPU. Builds nothing, and
# takes less than 8 minutes:
#
#     benches/gpu/run.sh SAMITE OUT [TESTS [MODEL]]
#
# SAMITE is a program with the feature `wgpu`. TESTS is a folder with test programs of
# `samite-wgpu` (`device`, `faults`, `kernels`, `memory`, `random`: `cargo test --release -p
# samite-wgpu --no-run`), MODEL a GGUF file with real weights. Writes OUT/results.md and a log for
# each step. A step that fails is named in the table, and the others go on.
#
# DEVICES are the devices to check, of which those that the program finds are used (default: `cuda0
# wgpu0`). PEER is a folder with one of ggml's plugins, which is measured as device PEER_DEVICE
# (default: `ggml:CUDA0`) of the same program.
set -u
samite=$(realpath "$1")
out=$2
tests=${3:+$(realpath "$3")}
model=${4:+$(realpath "$4")}
here=$(cd "$(dirname "$0")" && pwd)
stories=$here/../../models/stories/stories.gguf
mkdir -p "$out"
out=$(realpath "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
results=$out/results.md
failed=0

say() { printf '%s\n' "$*" | tee -a "$results"; }
left() { echo $((${LIMIT:-470} - SECONDS)); }

# step NAME SECONDS COMMAND...: one check, with a row that says how it ended.
step() {
  local name=$1 limit=$2 begun=$SECONDS status
  shift 2
  [ "$(left)" -gt 5 ] || { say "| $name | skipped: no time left | |"; failed=1; return; }
  timeout "$(($limit < $(left) ? $limit : $(left)))" "$@" >"$out/$name.log" 2>&1
  status=$?
  [ $status = 0 ] || failed=1
  say "| $name | $([ $status = 0 ] && echo passed || echo "FAILED ($status)") | $((SECONDS - begun)) s |"
}

# speed NAME FILE FLAGS...: rows of `samite bench`.
speed() {
  local name=$1 file=$2
  shift 2
  [ "$(left)" -gt 10 ] || { say "| $name | | skipped: no time left |"; return; }
  timeout "$(left)" "$samite" bench -m "$file" --no-peaks --json "$@" >"$out/bench-$name.json" 2>"$out/bench-$name.log" ||
    { say "| $name | | FAILED: $(tail -n 1 "$out/bench-$name.log") |"; failed=1; return; }
  python3 - "$name" "$out/bench-$name.json" <<'P' | tee -a "$results"
import json, sys
name, path = sys.argv[1:]
report = json.load(open(path))
for row in report["results"]:
    print(f"| {name} | {row['test']} | {row['median']:.0f} |")
P
}

text() { "$samite" run -m "$stories" -p "Once upon a time" -n 60 --temp 0 "$@" 2>/dev/null; }
same_text() { diff <(text --device cpu --no-repack) <(text "$@"); }
export samite stories
export -f text same_text

# check_device DEVICE: contract, operations and texts.
check_device() {
  local device=$1 off
  say ""
  say "$(grep -E "^[ *] $device +" "$out/devices.log" | sed 's/^[* ]*//')"
  say ""
  say "| check | result | time |"
  say "|---|---|---|"
  step "$device-contract" 60 "$samite" test-ops --contract --device "$device"
  step "$device-text-alone" 20 bash -c "same_text --no-repack --device $device"
  case $device in
    cuda*) off="graphs" ;;
    *) off="matrices subgroups" ;;
  esac
  for off in $off; do
    step "$device-text-without-$off" 20 bash -c "same_text --no-repack --device $device:$off=off"
  done
  step "$device-text-split" 20 bash -c \
    "same_text --no-repack --device $device,cpu --place 'layers=0-2:$device'"
  step "$device-operations" 120 "$samite" test-ops --device "$device" --only
}

# measure_devices SHAPE TYPE: speeds of one model on all devices.
measure_devices() {
  local file=$work/$1-$2.gguf name device
  [ "$(left)" -gt 60 ] || return
  "$samite" synth "$file" --shape "$1" --type "$2" >/dev/null 2>&1 ||
    { say "| $1 | | no such shape |"; return; }
  for device in $devices; do
    name=$1-$2-$device
    speed "$name" "$file" --device "$device" -p 512,4096 -n 64 -r 3
    speed "$name-deep" "$file" --device "$device" -p 0 -n 32 -d 4096,16384 -r 1
    speed "$name-32-sequences" "$file" --device "$device" -p 0 -n 32 -r 1 --sequences 32
  done
  if [ -n "${PEER:-}" ]; then
    SAMITE_BACKEND_PATH=$PEER speed "$1-$2-peer" "$file" --device "${PEER_DEVICE:-ggml:CUDA0}" \
      -p 512,4096 -n 64 -r 3
  fi
  rm -f "$file"
}

: >"$results"
"$samite" devices -v >"$out/devices.log" 2>&1
devices=
for device in ${DEVICES:-cuda0 wgpu0}; do
  if grep -qE "^[ *] $device +" "$out/devices.log"; then
    devices="$devices $device"
  else
    say "$device was not found: $out/devices.log has the reason"
  fi
done
for device in $devices; do check_device "$device"; done
if [ -n "$tests" ]; then
  for test in device faults kernels memory random; do
    program=$(ls "$tests/$test"* 2>/dev/null | head -n 1)
    [ -n "$program" ] && step "test-$test" 90 "$program" --test-threads 4
  done
fi
say ""
say "| model | work | tokens/s |"
say "|---|---|---|"
for spec in tinyllama-1.1b:q4_0 llama3-8b:q4_0 llama3-8b:q4_k; do
  measure_devices "${spec%:*}" "${spec#*:}"
done
if [ -n "$model" ]; then
  for device in $devices; do
    step "$device-accuracy" 100 python3 "$here/../accuracy/kl.py" --samite "$samite" \
      --model "$model" --device "$device" --folder "$work" --types Q4_0 Q5_1 Q8_0 Q4_K Q6_K
    say ""
    say '```'
    say "$(cat "$out/$device-accuracy.log")"
    say '```'
  done
fi
say ""
say "$SECONDS s, $([ $failed = 0 ] && echo 'all passed' || echo 'with failures')"
exit $failed
