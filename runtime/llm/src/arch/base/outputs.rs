//! Metadata about embeddings: their pooling, and the matrices that they go through.

use super::Base;
use crate::arch::keys::Keys;
use crate::arch::spec::{
    Branch, Classifier, Layer, Linear, Mixer, Norm, NormKind, Pooling, Presence, Projection, Spec,
};
use crate::error::Result;
use samite_core::Unary;
use samite_gguf::StringArray;

/// Epsilon of classifier norms if the file does not specify one.
const CLASSIFIER_EPSILON: f32 = 1e-5;

impl Base<'_> {
    /// Creates an encoder: a model with bidirectional attention that returns embeddings and no
    /// logits.
    ///
    /// # Errors
    /// Returns the errors of `layer`.
    pub fn encoder(&self, layer: impl FnMut(usize) -> Result<Layer>) -> Result<Spec> {
        let mut spec = self.decoder(layer)?;
        spec.set_bidirectional();
        spec.head.output = None;
        Ok(spec)
    }

    /// Creates the classifier, if the file has one: a matrix with `function`, a norm, and a matrix
    /// with a row for each label.
    ///
    /// # Errors
    /// Returns an error if the list of labels is invalid, or if a classifier does not support the
    /// kind of pooling.
    pub fn classifier(&self, function: Unary) -> Result<Option<Classifier>> {
        let has = |name: &str| self.keys.has_tensor(&format!("{name}.weight"));
        if !has("cls") && !has("cls.output") {
            return Ok(None);
        }
        let labels = self.keys.get::<&StringArray>("classifier.output_labels")?;
        let labels = labels.map_or(0, StringArray::len).max(1);
        // Without a matrix of labels, the first matrix returns the scores.
        let width = if has("cls.output") {
            self.n_embd
        } else {
            labels
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

    /// Returns the matrices that embeddings go through and that the file has.
    ///
    /// # Errors
    /// Returns an error if the file does not specify the length of their rows.
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

/// Returns the kind of pooling in the key `name`.
fn pooling(keys: &Keys<'_>, name: &str) -> Result<Option<Pooling>> {
    // Some files use these numbers for unspecified pooling.
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

/// Returns whether a branch cannot be bidirectional.
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
        | Mixer::Identity => false,
    }
}

/// Reads the metadata about embeddings that files of any architecture may have.
pub(in crate::arch) fn read(mut spec: Spec, keys: &Keys<'_>) -> Result<Spec> {
    const CAUSAL: &str = "attention.causal";
    spec.pooling = pooling(keys, "pooling_type")?;
    if keys.get::<bool>(CAUSAL)? == Some(false) && !spec.is_bidirectional() {
        let is_refused = (spec.layers.iter().flat_map(Layer::branches)).any(needs_past);
        if is_refused {
            return Err(keys.error(
                CAUSAL,
                "is false, which is not supported for layers with a gated delta rule, a state space, short rows, or the keys of other layers",
            ));
        }
        spec.set_bidirectional();
    }
    Ok(spec)
}
