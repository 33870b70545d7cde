#!/bin/sh
# Everything that docs/performance.md compares with llama.cpp, in interleaved pairs:
#
#     benches/compare.sh LLAMA_CPP_BIN FOLDER [THREADS]
#
# LLAMA_CPP_BIN has llama-bench, llama-batched-bench, llama-quantize and llama-completion of
# llama.cpp 0.8.0 (docs/performance.md, "Comparing with llama.cpp"). Models (10 GB) and results are
# written to FOLDER; existing models are kept. ROWS, a list of names, chooses rows; PAIRS is 12
# unless set. Nothing else should run meanwhile: it takes hours.
set -eu

llama=$1
folder=$2
threads=${3:-1}
pairs=${PAIRS:-12}
here=$(cd "$(dirname "$0")" && pwd)
samite=${SAMITE:-$here/../target/release/samite}
results=$folder/results
mkdir -p "$results"

# model NAME SHAPE TYPE: random weights, all matrices of one type.
model() {
    [ -f "$folder/$1.gguf" ] || "$samite" synth "$folder/$1.gguf" --shape "$2" --type "$3"
}

# mixture NAME SOURCE TYPE: quantized as llama.cpp mixes types.
mixture() {
    [ -f "$folder/$1.gguf" ] || "$samite" quantize "$folder/$2.gguf" "$folder/$1.gguf" "$3" >/dev/null
}

chosen() {
    [ -z "${ROWS:-}" ] || case " $ROWS " in *" $1 "*) ;; *) return 1 ;; esac
}

# bench ROW MODEL FLAGS...: one run of `samite bench --compare`.
bench() {
    row=$1
    file=$2
    shift 2
    chosen "$row" || return 0
    "$samite" bench -m "$folder/$file.gguf" --compare "$llama/llama-bench" -t "$threads" --pairs "$pairs" --json "$@" \
        >"$results/$row.json"
    python3 "$here/row.py" "$row" "$results/$row.json"
}

# pairs ROW FIRST SECOND: whole programs.
pairs() {
    chosen "$1" || return 0
    python3 "$here/pairs.py" --pairs "$pairs" "$@" | tee "$results/$1.md"
}

model tinyllama-q4_0 tinyllama-1.1b q4_0
model tinyllama-q8_0 tinyllama-1.1b q8_0
model tinyllama-f16 tinyllama-1.1b f16
model qwen3-0.6b-q4_0 qwen3-0.6b q4_0
model qwen3-0.6b-q8_0 qwen3-0.6b q8_0
model qwen3-0.6b-f16 qwen3-0.6b f16
model small-moe-q4_0 small-moe q4_0
for type in Q4_K_M Q5_K_M Q6_K; do
    mixture "tinyllama-$(echo $type | tr A-Z a-z)" tinyllama-f16 $type
done
mixture qwen3-0.6b-q4_k_m qwen3-0.6b-f16 Q4_K_M

echo "| row | work | samite t/s | llama.cpp t/s (repack) | ratio | 95 % interval | pairs (restless) | share of limit |"
echo "|---|---|---|---|---|---|---|---|"
for shape in tinyllama qwen3-0.6b; do
    for type in q4_0 q8_0 q4_k_m; do
        bench $shape-$type $shape-$type -p 512 -n 64
    done
    bench $shape-f16 $shape-f16 -p 512 -n 0
done
for type in q5_k_m q6_k; do
    bench tinyllama-$type tinyllama-$type -p 512 -n 64
done
bench depth-f16 tinyllama-q4_0 -p 0 -n 64 -d 4096 -r 3
bench depth-q8_0 tinyllama-q4_0 -p 0 -n 64 -d 4096 -r 3 --kv q8_0
bench sequences tinyllama-q4_0 -p 0 -n 64 --sequences 8
bench small-moe small-moe-q4_0 -p 512 -n 64
# Of a model this small, one sample is some milliseconds long: many make one.
if [ -f "$folder/stories260K.gguf" ]; then
    bench stories260K stories260K -p 0 -n 64 -r 500
elif chosen stories260K; then
    echo "stories260K is left out: put stories260K.gguf, a trained model (tinyllamas/stories260K.gguf of ggml-org/models on" \
        "Hugging Face), into $folder" >&2
fi

echo
echo "| row | samite s | llama.cpp s | ratio | 95 % interval | pairs |"
echo "|---|---|---|---|---|---|"
for type in Q4_0 Q8_0 Q4_K; do
    pairs "quantize-$type" \
        "$samite quantize $folder/tinyllama-f16.gguf $folder/ours.gguf $type -t $threads --pure" \
        "$llama/llama-quantize --pure $folder/tinyllama-f16.gguf $folder/theirs.gguf $type $threads"
done
rm -f "$folder/ours.gguf" "$folder/theirs.gguf"
pairs load-to-first-token \
    "$samite run -m $folder/tinyllama-q4_0.gguf -p a -n 1 -c 256 --temp 0 -t $threads" \
    "$llama/llama-completion -m $folder/tinyllama-q4_0.gguf -p a -n 1 -c 256 --temp 0 -t $threads -no-cnv --no-warmup"

# Everything that was measured, to be kept: all reports of this folder in one file, a line each.
python3 "$here/all.py" "$results" >"$results/all.json"
