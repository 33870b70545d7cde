#!/usr/bin/env bash
# Plants one mistake after the other in a copy of the sources, and says which seed of the simulator finds it:
#   runtime/sim/mistakes/run.sh [NAME...]
# A mistake is a patch in this folder whose first line says what is wrong; NAME is a part of its file's name. All but two have to be found within
# 10,000 seeds, or those of SAMITE_SIM_SEEDS=first..end. Fails, too, if a patch does not apply or does not compile.
set -euo pipefail
cd "$(dirname "$0")/../../.."
work=$PWD/target/mistakes
export SAMITE_SIM_SEEDS=${SAMITE_SIM_SEEDS:-0..10000}
# The seed is wanted, not the smallest case.
export SAMITE_SIM_SHRINK=0
export CARGO_TARGET_DIR=$work/build
# The copy lies in this repository without being a part of it.
export GIT_CEILING_DIRECTORIES=$work

patches=()
for patch in "$PWD"/runtime/sim/mistakes/*.patch; do
  for part in "${@-}"; do
    [[ $(basename "$patch" .patch) != *"$part"* ]] || { patches+=("$patch") && break; }
  done
done
[ ${#patches[@]} -gt 0 ] || { echo "no mistake is called like that"; exit 1; }

# All files are new, so that cargo takes nothing for built that an earlier call built with a mistake.
rm -rf "$work/tree" && mkdir -p "$work/tree"
git ls-files -z | tar -c --null --ignore-failed-read --files-from=- | tar -x -m -C "$work/tree"
cd "$work/tree"

build() { cargo test --quiet --locked -p samite-sim --test seeds --no-run >"$work/log.txt" 2>&1; }
# Prints the seed that failed. What hangs was not found: nobody would know the seed.
play() {
  timeout 600 cargo test --quiet --locked -p samite-sim --test seeds seeds_pass >"$work/log.txt" 2>&1 ||
    sed -n 's/.*; again: samite dev sim --seed \([0-9]*\).*/\1/p' "$work/log.txt" | head -n 1
}
if ! build || [ -n "$(play)" ] || ! grep -q "test result: ok" "$work/log.txt"; then
  cat "$work/log.txt"
  echo "without mistakes, all seeds have to pass"
  exit 1
fi
missed=0
printf '%-30s %8s %8s\n' mistake seed seconds
for patch in "${patches[@]}"; do
  name=$(basename "$patch" .patch)
  git apply "$patch" || { echo "$name does not apply"; exit 1; }
  build || { cat "$work/log.txt"; echo "$name does not compile"; exit 1; }
  start=$SECONDS
  seed=$(play)
  printf '%-30s %8s %8d\n' "$name" "${seed:-missed}" $((SECONDS - start))
  [ -n "$seed" ] || missed=$((missed + 1))
  git apply -R "$patch"
done
echo "$((${#patches[@]} - missed)) of ${#patches[@]} found"
[ "$missed" -le 2 ]
