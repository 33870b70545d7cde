
// Operand `{{name}}`: its words, and where its rows and elements are.

fn shape_{{name}}() -> vec4<u32> {
    return parameters.tensors[{{number}}].shape;
}

// The byte of the first element of row `row`.
fn row_{{name}}(row: vec3<u32>) -> u32 {
    let s = parameters.tensors[{{number}}].strides;
    return parameters.tensors[{{number}}].start + row.x * s.y + row.y * s.z + row.z * s.w;
}

// The byte of an element of a type without blocks.
fn at_{{name}}(i: vec4<u32>) -> u32 {
    return row_{{name}}(i.yzw) + i.x * parameters.tensors[{{number}}].strides.x;
}

fn aligned_{{name}}(i: u32) -> u32 {
    return {{load}};
}

// Four bytes from byte `at` on, wherever that is.
fn word_{{name}}(at: u32) -> u32 {
    let shift = (at & 3u) * 8u;
    let low = aligned_{{name}}(at >> 2u) >> shift;
    if shift == 0u {
        return low;
    }
    return low | (aligned_{{name}}((at >> 2u) + 1u) << (32u - shift));
}

// Four words from byte `at` on.
fn words4_{{name}}(at: u32) -> vec4<u32> {
    let i = at >> 2u;
    let shift = (at & 3u) * 8u;
    let low = vec4<u32>(aligned_{{name}}(i), aligned_{{name}}(i + 1u), aligned_{{name}}(i + 2u), aligned_{{name}}(i + 3u));
    if shift == 0u {
        return low;
    }
    let high = vec4<u32>(low.yzw, aligned_{{name}}(i + 4u));
    return (low >> vec4<u32>(shift)) | (high << vec4<u32>(32u - shift));
}

// Two bytes at an even place.
fn half_{{name}}(at: u32) -> u32 {
    return (aligned_{{name}}(at >> 2u) >> ((at & 2u) * 8u)) & 0xffffu;
}

fn byte_{{name}}(at: u32) -> u32 {
    return (aligned_{{name}}(at >> 2u) >> ((at & 3u) * 8u)) & 0xffu;
}
