// Sets two bytes at an even place; others may set the other half of the word.
fn store_half_{{name}}(at: u32, bits: u32) {
    let shift = (at & 2u) * 8u;
    atomicAnd(&{{buffer}}[at >> 2u], ~(0xffffu << shift));
    atomicOr(&{{buffer}}[at >> 2u], bits << shift);
}
