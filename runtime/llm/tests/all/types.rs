//! Models with matrices of each type that weights can have.

use crate::common::*;
use samite_core::DType;
use samite_llm::SyntheticModel;
use samite_quant::can_decode;

#[test]
fn cpu_results_match_the_reference_for_every_weight_type() {
    let mut count = 0;
    for dtype in DType::all().filter(|&dtype| can_decode(dtype)) {
        if [DType::F64, DType::Q8_1, DType::Q8_K].contains(&dtype) {
            continue; // not for weights
        }
        let file = TestModel::write(&SyntheticModel {
            dtype,
            n_layer: 1,
            n_embd: 256,
            n_head: 4,
            n_head_kv: 2,
            head_dim: 64,
            n_ff: 256,
            ..SyntheticModel::tiny("llama")
        });
        // Single tokens and several at once are computed by different kernels.
        let tokens = tokens(9);
        let [expected, at_once, one_by_one] = [(reference("reference"), 9), (cpu(), 9), (cpu(), 1)]
            .map(|(device, count)| {
                let model = file.load(vec![device], "");
                let mut context = context(&model, precise());
                let chunks = tokens.chunks(count).enumerate();
                chunks
                    .flat_map(|(i, chunk)| decode(&mut context, chunk, (i * count) as i32, 0))
                    .collect::<Vec<_>>()
            });
        // With quantized weights, columns are rounded to eight bits.
        let limit = if dtype.is_quantized() { 1e-3 } else { 1e-4 };
        for got in [at_once, one_by_one] {
            let error = nmse(&got, &expected);
            assert!(error < limit, "{dtype}: {error:e}");
        }
        count += 1;
    }
    assert_eq!(count, 29);
}
