//! What files say about embeddings: which tokens they are made of, and what they go through.

use super::Base;
use crate::arch::keys::Keys;
use crate::arch::spec::{
    Branch, Classifier, Layer, Linear, Mixer, Norm, NormKind, Pooling, Presence, Projection, Spec,
};
use crate::error::Result;
use samite_core::Unary;
use samite_gguf::StringArray;

/// Norms of classifiers have it where the file does not say another one.
const CLASSIFIER_EPSILON: f32 = 1e-5;

impl Base<'_> {
    /// A model whose tokens look at both sides, and which gives embeddings and no logits.
    ///
    /// # Errors
    /// What `layer` says.
    pub fn encoder(&self, layer: impl FnMut(usize) -> Result<Layer>) -> Result<Spec> {
        let mut spec = self.decoder(layer)?;
        spec.set_sees_later();
        spec.head.output = None;
        Ok(spec)
    }

    /// The classifier, if the file has one: a matrix and `function`, a norm, a matrix with a row for each label.
    ///
    /// # Errors
    /// For a list of labels that is none, or a kind of pooling that a classifier cannot have.
    pub fn classifier(&self, function: Unary) -> Result<Option<Classifier>> {
        let has = |name: &str| self.keys.has_tensor(&format!("{name}.weight"));
        if !has("cls") && !has("cls.output") {
            return Ok(None);
        }
        let labels = self.keys.get::<&StringArray>("classifier.output_labels")?;
        let labels = labels.map_or(0, StringArray::len).max(1);
        // Without a matrix of labels, the first one gives the scores.
        let width = match has("cls.output") {
            true => self.n_embd,
            false => labels,
        };
        let matrix = |name, to| Linear::new(name, [self.n_embd, to]).bias(Presence::Optional);
        let kind = match self.norm {
            kind @ NormKind::Layer(_) => kind,
            NormKind::Rms(_) => NormKind::Layer(CLASSIFIER_EPSILON),
        };
        let norm = has("cls.norm").then(|| Norm {
            kind,
            bias: Presence::Absent,
            ..self.norm("cls.norm", width)
        });
        Ok(Some(Classifier {
            of_mean: pooling(self.keys, "classifier.pooling_type")? == Some(Pooling::Mean),
            dense: has("cls").then(|| (matrix("cls", width), function)),
            norm,
            output: has("cls.output")
                .then(|| Linear::new("cls.output", [width, labels]).bias(Presence::Optional)),
            shares: false,
        }))
    }

    /// The matrices that embeddings go through, as far as the file has them.
    ///
    /// # Errors
    /// If it does not say how long the rows are that they give.
    pub fn dense(&self) -> Result<Vec<Linear>> {
        let has = |name: &str| self.keys.has_tensor(&format!("{name}.weight"));
        let mut dense = Vec::new();
        let mut width = self.n_embd;
        if has("dense_2") {
            let to = match self.keys.extent("dense_2_feat_out")? {
                Some(to) => to,
                None => self.keys.extent("embedding_length_out")?.unwrap_or(width),
            };
            dense.push(Linear::new("dense_2", [width, to]).bias(Presence::Optional));
            width = to;
        }
        if has("dense_3") {
            let to = self.keys.extent("dense_3_feat_out")?;
            dense.push(Linear::new("dense_3", [width, to.unwrap_or(self.n_embd)]));
        }
        Ok(dense)
    }
}

/// The kind of pooling that the key `name` says.
fn pooling(keys: &Keys<'_>, name: &str) -> Result<Option<Pooling>> {
    // Some files say "unknown" so.
    const UNKNOWN: [i64; 2] = [-1, u32::MAX as i64];
    let number = keys.get::<i64>(name)?;
    let Some(number) = number.filter(|number| !UNKNOWN.contains(number)) else {
        return Ok(None);
    };
    let known = usize::try_from(number).ok();
    match known.and_then(|number| Pooling::ALL.get(number)) {
        Some(&pooling) => Ok(Some(pooling)),
        None => Err(keys.error(name, format_args!("is {number}, must be 0 to 4"))),
    }
}

/// Whether a branch cannot look at both sides.
fn needs_past(branch: &Branch) -> bool {
    match &branch.mixer {
        Mixer::DeltaNet(_) | Mixer::StateSpace(_) => true,
        Mixer::Attention(attention) => {
            attention.keys_of.is_some() || matches!(&attention.projection, Projection::Latent(_))
        }
        Mixer::ShortConv(_)
        | Mixer::Mlp(_)
        | Mixer::Experts(_)
        | Mixer::Linear(_)
        | Mixer::LowRank(..)
        | Mixer::PerLayer(..)
        | Mixer::Nothing => false,
    }
}

/// Reads what files of any architecture may say about embeddings.
pub(in crate::arch) fn read(mut spec: Spec, keys: &Keys<'_>) -> Result<Spec> {
    const CAUSAL: &str = "attention.causal";
    spec.pooling = pooling(keys, "pooling_type")?;
    if keys.get::<bool>(CAUSAL)? == Some(false) && !spec.sees_later() {
        let is_refused = (spec.layers.iter().flat_map(Layer::branches)).any(needs_past);
        if is_refused {
            return Err(keys.error(
                CAUSAL,
                "is false, which is not supported for layers with a gated delta rule, a state space, short rows, or the keys of other layers",
            ));
        }
        spec.set_sees_later();
    }
    Ok(spec)
}
