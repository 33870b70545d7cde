fn get_{{name}}(i: vec4<u32>) -> f32 {
    return load4_{{name}}(row_{{name}}(i.yzw), i.x & ~3u)[i.x & 3u];
}
