//! Models and the functions that query them.

use crate::adapters::ADAPTERS;
use crate::entry::{Failure, Outcome, alias, export, print, text};
use crate::handles::Handles;
use crate::layout::Opaque;
use crate::metadata::Readable;
use crate::names;
use crate::sampler::grammar::forget_unused;
use crate::vocabulary::Vocabulary;
use samite_core::RopeMode;
use samite_gguf::{Metadata, StringArray};
use samite_llm::Model as Engine;
use samite_llm::arch::Spec;
use samite_llm::arch::spec::Layer;
use std::ffi::{CString, c_char, c_int};
use std::sync::Arc;

/// A caller's model. Its vocabulary has the same handle.
pub struct LlamaModel {
    /// Handle of the model.
    pub handle: usize,
    /// Engine with weights, or without them for planning; `None` for a vocabulary only.
    pub engine: Option<Arc<Engine>>,
    /// Vocabulary, if the model has one.
    pub vocabulary: Option<Vocabulary>,
    /// Metadata of its file.
    pub metadata: Metadata,
    /// Metadata as text.
    pub readable: Readable,
    /// `general.architecture`.
    pub architecture: String,
    /// Number of elements.
    pub n_params: u64,
    /// Size of its tensors in bytes.
    pub bytes: u64,
    /// Load time in microseconds.
    pub load_us: i64,
    /// Time at which loading started, in microseconds.
    pub start_us: i64,
    templates: Vec<(String, CString)>,
    labels: Vec<CString>,
}

/// All models.
pub static MODELS: Handles<LlamaModel> = Handles::new("model or vocabulary");

/// Returns the model of a handle.
///
/// # Errors
/// If the handle is not a model.
pub fn model(handle: *const Opaque) -> Outcome<Arc<LlamaModel>> {
    MODELS.get(handle)
}

impl LlamaModel {
    /// Creates a model from its file's metadata. The engine is added later.
    pub fn new(metadata: Metadata, vocabulary: Option<Vocabulary>) -> Self {
        const TEMPLATE: &str = "tokenizer.chat_template";
        let readable = Readable::new(&metadata);
        let architecture = metadata
            .get::<&str>("general.architecture")
            .ok()
            .flatten()
            .unwrap_or_default()
            .to_owned();
        let templates = metadata.iter().filter_map(|(key, _)| {
            let name = match key.strip_prefix(TEMPLATE)? {
                "" => "",
                rest => rest.strip_prefix('.')?,
            };
            let source = metadata.get::<&str>(key).ok().flatten()?;
            Some((name.to_owned(), CString::new(source).ok()?))
        });
        let labels = metadata
            .get::<&StringArray>(&format!("{architecture}.classifier.output_labels"))
            .ok()
            .flatten();
        let labels = labels.into_iter().flat_map(|labels| labels.iter());
        LlamaModel {
            handle: 0,
            engine: None,
            vocabulary,
            templates: templates.collect(),
            labels: labels
                .filter_map(|label| CString::new(label).ok())
                .collect(),
            readable,
            architecture,
            n_params: 0,
            bytes: 0,
            load_us: 0,
            start_us: 0,
            metadata,
        }
    }

    /// Returns the engine, with or without weights.
    ///
    /// # Errors
    /// If only the vocabulary was loaded.
    pub fn engine(&self) -> Outcome<&Arc<Engine>> {
        self.engine
            .as_ref()
            .ok_or_else(|| Failure::new("the model was loaded for its vocabulary alone"))
    }

    /// Returns the vocabulary.
    ///
    /// # Errors
    /// If the model has none.
    pub fn vocabulary(&self) -> Outcome<&Vocabulary> {
        self.vocabulary
            .as_ref()
            .ok_or_else(|| Failure::new("the model has no vocabulary"))
    }

    /// Returns the model's specification, unless only the vocabulary was loaded.
    pub fn spec(&self) -> Option<&Spec> {
        self.engine.as_ref().map(|engine| engine.spec())
    }

    /// Returns whether positions have several axes, with which llama.cpp passes positions in
    /// images.
    pub fn has_position_axes(&self) -> bool {
        let key = format!("{}.rope.dimension_sections", self.architecture);
        self.metadata.contains(&key)
    }

    /// Returns an integer of this architecture's metadata; of an array, the first element.
    pub fn number(&self, name: &str) -> Option<i64> {
        let key = format!("{}.{name}", self.architecture);
        if let Ok(number) = self.metadata.get::<i64>(&key) {
            return number;
        }
        let list = self.metadata.get::<Vec<i64>>(&key).ok().flatten();
        list.and_then(|list| list.first().copied())
    }

    /// Returns `general.file_type`, or the number of the type with most bytes.
    pub fn file_type(&self) -> i32 {
        let number = self.metadata.get::<i64>("general.file_type");
        number.ok().flatten().map_or(0, |number| number as i32)
    }

    /// Returns a short description of the model, such as `llama 1B Q4_K - Medium`.
    pub fn description(&self) -> String {
        let size = self.metadata.get::<&str>("general.size_label");
        let size = size.ok().flatten().map_or_else(
            || match self.n_params {
                0 => "?B".to_owned(),
                n if n < 1_000_000_000 => format!("{:.2}M", n as f64 / 1e6),
                n => format!("{:.2}B", n as f64 / 1e9),
            },
            str::to_owned,
        );
        format!(
            "{} {size} {}",
            self.architecture,
            names::file_type(self.file_type()).to_string_lossy()
        )
    }

    /// Returns whether the model has recurrent state, and whether it has attention.
    fn keeps(&self) -> [bool; 2] {
        let Some(spec) = self.spec() else {
            return [false; 2];
        };
        let attends = spec.layers.iter().any(|layer| layer.attention().is_some());
        [spec.has_state(), attends]
    }
}

fn number_of(handle: *const Opaque, name: &str) -> Outcome<i32> {
    Ok(model(handle)?
        .number(name)
        .map_or(0, |number| number as i32))
}

export! {
    /// Frees a model with its adapters. Contexts that use it keep what they need.
    fn llama_model_free(handle: *mut Opaque), or (); {
        if let Some(gone) = MODELS.remove(handle)? {
            ADAPTERS.retain(|adapter| adapter.model != gone.handle);
            drop(gone);
            forget_unused();
        }
        Ok(())
    }

    /// Returns the vocabulary of a model.
    fn llama_model_get_vocab(handle: *const Opaque) -> *const Opaque, or std::ptr::null(); {
        model(handle)?;
        Ok(handle)
    }

    /// Returns the RoPE type of its layers.
    fn llama_model_rope_type(handle: *const Opaque) -> c_int, or -1; {
        let model = model(handle)?;
        let attentions = model
            .spec()
            .map(|spec| spec.layers.iter().filter_map(Layer::attention));
        let rotation =
            attentions.and_then(|mut attentions| attentions.find_map(|a| a.rotation.as_ref()));
        let has_sections = model.has_position_axes();
        Ok(match rotation.map(|rotation| rotation.rope.mode) {
            None => -1,
            Some(_) if has_sections => 8,
            Some(RopeMode::Normal) => 0,
            Some(RopeMode::Neox) => 2,
            Some(RopeMode::Multi { .. }) => 8,
            Some(RopeMode::Vision { .. }) => 24,
            Some(RopeMode::Interleaved { .. }) => 40,
        })
    }

    /// Returns the context length that the model was trained with.
    fn llama_model_n_ctx_train(handle: *const Opaque) -> i32, or 0; {
        number_of(handle, "context_length")
    }

    /// Returns the width of the residual stream.
    fn llama_model_n_embd(handle: *const Opaque) -> i32, or 0; {
        number_of(handle, "embedding_length")
    }

    /// Returns the width of input embeddings.
    fn llama_model_n_embd_inp(handle: *const Opaque) -> i32, or 0; {
        number_of(handle, "embedding_length")
    }

    /// Returns the width of output embeddings.
    fn llama_model_n_embd_out(handle: *const Opaque) -> i32, or 0; {
        let model = model(handle)?;
        let width = model.spec().map(|spec| {
            spec.embedding_width(samite_llm::arch::spec::Pooling::None) as i32
        });
        let written = || model.number("embedding_length").map_or(0, |number| number as i32);
        Ok(width.unwrap_or_else(written))
    }

    /// Returns the number of layers.
    fn llama_model_n_layer(handle: *const Opaque) -> i32, or 0; {
        let model = model(handle)?;
        let written = || model.number("block_count").map_or(0, |number| number as i32);
        Ok(model.spec().map_or_else(written, |spec| spec.n_layer() as i32))
    }

    /// Returns the number of MTP layers: none is computed.
    fn llama_model_n_layer_nextn(handle: *const Opaque) -> i32, or 0; {
        model(handle).map(|_| 0)
    }

    /// Returns the number of query heads in the first layer.
    fn llama_model_n_head(handle: *const Opaque) -> i32, or 0; {
        number_of(handle, "attention.head_count")
    }

    /// Returns the number of key heads in the first layer.
    fn llama_model_n_head_kv(handle: *const Opaque) -> i32, or 0; {
        let model = model(handle)?;
        let number = model.number("attention.head_count_kv");
        let number = number.or_else(|| model.number("attention.head_count"));
        Ok(number.map_or(0, |number| number as i32))
    }

    /// Returns the sliding window size, or 0 without one.
    fn llama_model_n_swa(handle: *const Opaque) -> i32, or 0; {
        let model = model(handle)?;
        let layers = model.spec().into_iter().flat_map(|spec| &spec.layers);
        let sizes = layers.filter_map(|layer| layer.attention()?.span.size());
        Ok(sizes.max().map_or(0, |size| size as i32))
    }

    /// Returns the RoPE frequency scale that the model was trained with.
    fn llama_model_rope_freq_scale_train(handle: *const Opaque) -> f32, or 0.0; {
        let model = model(handle)?;
        let layers = model.spec().into_iter().flat_map(|spec| &spec.layers);
        let mut rotations = layers.filter_map(|layer| layer.attention()?.rotation.as_ref());
        Ok(rotations.next().map_or(1.0, |rotation| rotation.rope.freq_scale))
    }

    /// Returns the number of classifier outputs.
    fn llama_model_n_cls_out(handle: *const Opaque) -> u32, or 0; {
        Ok((model(handle)?.labels.len() as u32).max(1))
    }

    /// Returns the label of a classifier output.
    fn llama_model_cls_label(handle: *const Opaque, index: u32) -> *const c_char,
        or std::ptr::null(); {
        let model = model(handle)?;
        Ok(model.labels.get(index as usize).map_or(std::ptr::null(), |label| label.as_ptr()))
    }

    /// Writes a metadata value as text.
    fn llama_model_meta_val_str(handle: *const Opaque, key: *const c_char, buffer: *mut c_char,
        size: usize) -> i32, or -1; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { model(handle)?.readable.print_value_of(key, buffer, size) }
    }

    /// Returns the number of metadata values that are not arrays.
    fn llama_model_meta_count(handle: *const Opaque) -> i32, or 0; {
        Ok(model(handle)?.readable.len() as i32)
    }

    /// Writes a metadata key by its index.
    fn llama_model_meta_key_by_index(handle: *const Opaque, index: i32, buffer: *mut c_char,
        size: usize) -> i32, or -1; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { model(handle)?.readable.print_key(index, buffer, size) }
    }

    /// Writes a metadata value by its index.
    fn llama_model_meta_val_str_by_index(handle: *const Opaque, index: i32, buffer: *mut c_char,
        size: usize) -> i32, or -1; {
        // SAFETY: the caller upholds the header's contract.
        unsafe { model(handle)?.readable.print_value(index, buffer, size) }
    }

    /// Writes a short description of the model.
    fn llama_model_desc(handle: *const Opaque, buffer: *mut c_char, size: usize) -> i32, or -1; {
        // SAFETY: the caller upholds the header's contract.
        Ok(unsafe { print(model(handle)?.description().as_bytes(), buffer, size) })
    }

    /// Returns the number of its file type.
    fn llama_model_ftype(handle: *const Opaque) -> c_int, or 0; {
        Ok(model(handle)?.file_type())
    }

    /// Returns the size of all tensors in bytes.
    fn llama_model_size(handle: *const Opaque) -> u64, or 0; {
        Ok(model(handle)?.bytes)
    }

    /// Returns the number of elements of all tensors.
    fn llama_model_n_params(handle: *const Opaque) -> u64, or 0; {
        Ok(model(handle)?.n_params)
    }

    /// Returns a chat template of the file, or null.
    fn llama_model_chat_template(handle: *const Opaque, name: *const c_char) -> *const c_char,
        or std::ptr::null(); {
        let model = model(handle)?;
        // SAFETY: the caller upholds the header's contract.
        let name = unsafe { text(name) };
        let name = name.map_or("".into(), |name| name.to_string_lossy());
        let found = model.templates.iter().find(|known| known.0 == name);
        Ok(found.map_or(std::ptr::null(), |(_, source)| source.as_ptr()))
    }

    /// Returns whether the model has a separate encoder, which is never the case.
    fn llama_model_has_encoder(handle: *const Opaque) -> bool, or false; {
        model(handle).map(|_| false)
    }

    /// Returns whether the model has a decoder.
    fn llama_model_has_decoder(handle: *const Opaque) -> bool, or false; {
        model(handle).map(|_| true)
    }

    /// Returns the start token of a decoder after an encoder: none.
    fn llama_model_decoder_start_token(handle: *const Opaque) -> i32, or -1; {
        model(handle).map(|_| -1)
    }

    /// Returns whether the model only has recurrent state.
    fn llama_model_is_recurrent(handle: *const Opaque) -> bool, or false; {
        Ok(model(handle)?.keeps() == [true, false])
    }

    /// Returns whether the model has both recurrent state and attention.
    fn llama_model_is_hybrid(handle: *const Opaque) -> bool, or false; {
        Ok(model(handle)?.keeps() == [true, true])
    }

    /// Returns whether it is a diffusion model, which fills in masks anywhere in a text.
    fn llama_model_is_diffusion(handle: *const Opaque) -> bool, or false; {
        const DIFFUSION: [&str; 4] = ["dream", "llada", "llada-moe", "rnd1"];
        Ok(DIFFUSION.contains(&&*model(handle)?.architecture))
    }

    /// Saves a model to a file: not supported.
    fn llama_model_save_to_file(handle: *const Opaque, _path: *const c_char), or (); {
        model(handle)?;
        Err(Failure::unsupported("models are not written; copy the file"))
    }
}

alias! {
    fn llama_free_model(handle: *mut Opaque) = llama_model_free;
    fn llama_n_ctx_train(handle: *const Opaque) -> i32 = llama_model_n_ctx_train;
    fn llama_n_embd(handle: *const Opaque) -> i32 = llama_model_n_embd;
    fn llama_n_layer(handle: *const Opaque) -> i32 = llama_model_n_layer;
    fn llama_n_head(handle: *const Opaque) -> i32 = llama_model_n_head;
}
