//! Llama, and models of the same shape.

use crate::arch::spec::Divisors;
use crate::arch::{Architecture, Base};
use samite_core::RopeMode;

/// Llama, Mistral, Mixtral, TinyLlama, SmolLM, ...
pub(super) const LLAMA: Architecture = Architecture {
    name: "llama",
    spec: |keys| {
        let base = Base::read(keys, RopeMode::Normal)?;
        let experts = base.expert_counts()?;
        base.decoder(|il| {
            let mut attention = base.attention(il)?;
            // Llama 3.1 and later stretch their frequencies unevenly.
            attention.set_divisors(Divisors::Frequencies);
            Ok(match experts {
                Some(counts) => base.pre_norm(il, attention, base.experts(counts, base.width(il)?)),
                None => base.pre_norm(il, attention, base.swiglu(il)?),
            })
        })
    },
};
