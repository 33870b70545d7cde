#!/usr/bin/env bash
# Plants one mistake after the other in a copy of the sources, and says which seed of the simulator finds it:
#   runtime/sim/mistakes/run.sh [NAME...]
# A mistake is a patch in this folder; its first line says what is wrong, NAME is a part of its file's name. All but one have to be found within
# 10,000 seeds, or those of SAMITE_SIM_SEEDS=first..end. Fails, too, if a patch does not apply or does not compile.
set -euo pipefail
cd "$(dirname "$0")/../../.."
patches=$PWD/runtime/sim/mistakes
work=$PWD/target/mistakes
tree=$work/tree
export SAMITE_SIM_SEEDS=${SAMITE_SIM_SEEDS:-0..10000}
# The seed is wanted, not the smallest case.
export SAMITE_SIM_SHRINK=0
export CARGO_TARGET_DIR=$work/build
# The copy is no repository of its own, and patches are not for the one around it.
export GIT_CEILING_DIRECTORIES=$work

# Files are new, so that cargo takes nothing for built that an earlier call built from other contents.
rm -rf "$tree" && mkdir -p "$tree"
git ls-files -z | while IFS= read -r -d '' file; do [ ! -e "$file" ] || printf '%s\0' "$file"; done |
  tar -c --null --files-from=- | tar -x -m -C "$tree"
cd "$tree"

build() { cargo test --quiet --locked -p samite-sim --test seeds --no-run >"$work/log.txt" 2>&1; }
play() { timeout 600 cargo test --quiet --locked -p samite-sim --test seeds seeds_pass >"$work/log.txt" 2>&1; }

if ! build || ! play; then
  cat "$work/log.txt"
  echo "the simulator has to pass without mistakes first"
  exit 1
fi

count=0 missed=0
printf '%-32s %8s %8s\n' mistake "seed" "seconds"
for patch in "$patches"/*.patch; do
  name=$(basename "$patch" .patch)
  [ $# = 0 ] || { for part in "$@"; do case $name in *"$part"*) break ;; esac; done; case $name in *"$part"*) ;; *) continue ;; esac; }
  count=$((count + 1))
  git apply "$patch" || { echo "$name does not apply"; exit 1; }
  build || { cat "$work/log.txt"; echo "$name does not compile"; exit 1; }
  start=$SECONDS seed=
  play || seed=$(sed -n 's/.*; again: samite sim --seed \([0-9]*\).*/\1/p' "$work/log.txt" | head -n 1)
  printf '%-32s %8s %8d\n' "$name" "${seed:-missed}" $((SECONDS - start))
  [ -n "$seed" ] || missed=$((missed + 1))
  git apply -R "$patch"
done

echo "$((count - missed)) of $count found"
[ "$count" -gt 0 ] && [ "$missed" -le 1 ]
