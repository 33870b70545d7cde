//! Minimum work for one token, which serves as a reference for measured speeds.

use samite_gguf::Tensors;

/// Work that every token needs on any device. Attention and the cache come on top.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenCost {
    /// Bytes of weights that are read to decode one token: all except an embedding table that is
    /// only looked up. Of the experts, only those that a token uses count.
    pub read_bytes: f64,
    /// Elements of quantized matrices that each token of a prompt is multiplied by: all except the
    /// embedding and output matrices, which only the last token needs.
    pub quantized_products: f64,
    /// Elements of float matrices that each token of a prompt is multiplied by.
    pub float_products: f64,
}

impl TokenCost {
    pub(crate) fn new(tensors: &Tensors, experts: Option<[usize; 2]>) -> Self {
        let untied = tensors.get("output.weight").is_some();
        let mut cost = TokenCost::default();
        for info in tensors {
            let is_embedding = &*info.name == "token_embd.weight";
            let is_output = info.name.starts_with("output");
            // Only experts have stacked matrices.
            let used = match experts {
                Some([count, used]) if info.shape[2] > 1 => used as f64 / count as f64,
                _ => 1.0,
            };
            if !(is_embedding && untied) {
                cost.read_bytes += used * info.size as f64;
            }
            if !is_embedding && !is_output && info.shape[1] > 1 {
                let products = if info.dtype.is_quantized() {
                    &mut cost.quantized_products
                } else {
                    &mut cost.float_products
                };
                *products += used * info.elements() as f64;
            }
        }
        cost
    }
}
