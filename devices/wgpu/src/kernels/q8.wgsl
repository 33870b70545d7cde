
// Columns as 8-bit numbers, in scratch memory: first four numbers a word, column after column; then, for each 16 numbers, what they are multiplied by, and that
// times their sum. 32 elements share a scale.

var<workgroup> largest_of: array<f32, 256>;
var<workgroup> sum_of: array<i32, 256>;

// Element `k` to `k + 3` of column `column`, of `columns` of length `length`: called by all 256 invocations of a workgroup, of which eight neighbours have the
// elements that share a scale. Those behind the end have `length` in place of `k`, or more.
fn quantize(x: vec4<f32>, k: u32, column: u32, length: u32, columns: u32, local: u32) {
    let a = abs(x);
    workgroupBarrier();
    largest_of[local] = max(max(a.x, a.y), max(a.z, a.w));
    workgroupBarrier();
    let first = local & 248u;
    var largest = 0.0;
    {{#j 8}} largest = max(largest, largest_of[first + {{j}}u]); {{/j}}
    let d = largest / 127.0;
    let q = vec4<i32>(round(x * select(0.0, 127.0 / largest, largest > 0.0)));
    sum_of[local] = q.x + q.y + q.z + q.w;
    workgroupBarrier();
    if k < length {
        store_int_w(parameters.tensors[{{scratch}}].start + 4u * (column * (length / 4u) + k / 4u), bitcast<i32>(pack4xI8(q)));
        if (local & 3u) == 0u {
            let sum = sum_of[local] + sum_of[local + 1u] + sum_of[local + 2u] + sum_of[local + 3u];
            let at = parameters.tensors[{{scratch}}].start + 4u * (columns * (length / 4u) + 2u * (column * (length / 16u) + k / 16u));
            store_int_w(at, bitcast<i32>(d));
            store_int_w(at + 4u, bitcast<i32>(d * f32(sum)));
        }
    }
}
