// Sets some bits of one word.

struct Parameters {
    word: u32,
    mask: u32,
    bits: u32,
}

@group(0) @binding(0) var<uniform> parameters: Parameters;
@group(0) @binding(1) var<storage, read_write> words: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let old = words[parameters.word];
    words[parameters.word] = (old & ~parameters.mask) | (parameters.bits & parameters.mask);
}
