// Sets two bytes at an even place of a block that no other invocation writes to.
fn store_half_{{name}}(at: u32, bits: u32) {
    let shift = (at & 2u) * 8u;
    let old = {{buffer}}[at >> 2u];
    {{buffer}}[at >> 2u] = (old & ~(0xffffu << shift)) | (bits << shift);
}
