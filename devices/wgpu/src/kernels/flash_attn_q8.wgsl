
// The results of one query's head, until they are made 8-bit numbers: for the product behind attention.
var<workgroup> results: array<f32, VALUE_SIZE>;

fn quantize_results(head: u32, token: u32, local: u32) {
    workgroupBarrier();
    let k = 4u * local;
    let is_mine = k < VALUE_SIZEu;
    var x = vec4<f32>(0.0);
    if is_mine {
        EACH(j, 4) { x[#j] = results[k + #ju];
        }
    }
    quantize(x, select(COLUMN_LENGTHu, head * VALUE_SIZEu + k, is_mine), token, COLUMN_LENGTHu, COLUMN_COUNTu, local);
}
