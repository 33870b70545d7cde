//! Models: what is known of one, and the functions that ask for it.

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

/// A model of a caller. Its vocabulary has the same handle.
pub struct Model {
    /// The number of its handle.
    pub handle: usize,
    /// With weights, or without them for plans; `None` for a vocabulary alone.
    pub engine: Option<Arc<Engine>>,
    /// Its vocabulary, if it has one.
    pub vocabulary: Option<Vocabulary>,
    /// What its file says.
    pub metadata: Metadata,
    /// The same as texts.
    pub readable: Readable,
    /// `general.architecture`.
    pub architecture: String,
    /// Its elements.
    pub n_params: u64,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// Microseconds that loading took.
    pub load_us: i64,
    /// When loading began.
    pub start_us: i64,
    templates: Vec<(String, CString)>,
    labels: Vec<CString>,
}

/// All models.
pub static MODELS: Handles<Model> = Handles::new("model or vocabulary");

/// What `handle` stands for.
///
/// # Errors
/// If that is no model.
pub fn model(handle: *const Opaque) -> Outcome<Arc<Model>> {
    MODELS.get(handle)
}

impl Model {
    /// What is known of a file. The engine comes later.
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
        Model {
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

    /// The engine with weights or without.
    ///
    /// # Errors
    /// For a vocabulary alone.
    pub fn engine(&self) -> Outcome<&Arc<Engine>> {
        self.engine
            .as_ref()
            .ok_or_else(|| Failure::new("the model was loaded for its vocabulary alone"))
    }

    /// The vocabulary.
    ///
    /// # Errors
    /// If there is none.
    pub fn vocabulary(&self) -> Outcome<&Vocabulary> {
        self.vocabulary
            .as_ref()
            .ok_or_else(|| Failure::new("the model has no vocabulary"))
    }

    /// What the model is made of, if more than its vocabulary is known.
    pub fn spec(&self) -> Option<&Spec> {
        self.engine.as_ref().map(|engine| engine.spec())
    }

    /// Whether positions have several axes, which is llama.cpp's way to pass places in pictures.
    pub fn has_position_axes(&self) -> bool {
        let key = format!("{}.rope.dimension_sections", self.architecture);
        self.metadata.contains(&key)
    }

    /// An integer that the file says of this architecture; of a list, the first one.
    pub fn number(&self, name: &str) -> Option<i64> {
        let key = format!("{}.{name}", self.architecture);
        if let Ok(number) = self.metadata.get::<i64>(&key) {
            return number;
        }
        let list = self.metadata.get::<Vec<i64>>(&key).ok().flatten();
        list.and_then(|list| list.first().copied())
    }

    /// The number of `general.file_type`, or that of the type that most bytes have.
    pub fn file_type(&self) -> i32 {
        let number = self.metadata.get::<i64>("general.file_type");
        number.ok().flatten().map_or(0, |number| number as i32)
    }

    /// The model in a few words, such as `llama 1B Q4_K - Medium`.
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

    /// Whether it keeps a state of what came, and whether it also looks at single tokens.
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
    /// Gives a model up, with the adapters that were loaded for it. Contexts that use it keep what they need.
    fn llama_model_free(handle: *mut Opaque), or (); {
        if let Some(gone) = MODELS.remove(handle)? {
            ADAPTERS.retain(|adapter| adapter.model != gone.handle);
            drop(gone);
            forget_unused();
        }
        Ok(())
    }

    /// The vocabulary of a model.
    fn llama_model_get_vocab(handle: *const Opaque) -> *const Opaque, or std::ptr::null(); {
        model(handle)?;
        Ok(handle)
    }

    /// Which kind of rotation its layers have.
    fn llama_model_rope_type(handle: *const Opaque) -> c_int, or -1; {
        let model = model(handle)?;
        let attentions = model.spec().map(|spec| spec.layers.iter().filter_map(Layer::attention));
        let rotation = attentions.and_then(|mut attentions| attentions.find_map(|a| a.rotation.as_ref()));
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

    /// The context that it was trained with.
    fn llama_model_n_ctx_train(handle: *const Opaque) -> i32, or 0; {
        number_of(handle, "context_length")
    }

    /// The width of the residual stream.
    fn llama_model_n_embd(handle: *const Opaque) -> i32, or 0; {
        number_of(handle, "embedding_length")
    }

    /// The width of what may come in place of tokens.
    fn llama_model_n_embd_inp(handle: *const Opaque) -> i32, or 0; {
        number_of(handle, "embedding_length")
    }

    /// The width of embeddings.
    fn llama_model_n_embd_out(handle: *const Opaque) -> i32, or 0; {
        let model = model(handle)?;
        let width = model.spec().map(|spec| {
            spec.embedding_width(samite_llm::arch::spec::Pooling::None) as i32
        });
        let written = || model.number("embedding_length").map_or(0, |number| number as i32);
        Ok(width.unwrap_or_else(written))
    }

    /// The number of layers.
    fn llama_model_n_layer(handle: *const Opaque) -> i32, or 0; {
        let model = model(handle)?;
        let written = || model.number("block_count").map_or(0, |number| number as i32);
        Ok(model.spec().map_or_else(written, |spec| spec.n_layer() as i32))
    }

    /// Layers that predict further tokens: none is computed.
    fn llama_model_n_layer_nextn(handle: *const Opaque) -> i32, or 0; {
        model(handle).map(|_| 0)
    }

    /// Heads of queries in the first layer.
    fn llama_model_n_head(handle: *const Opaque) -> i32, or 0; {
        number_of(handle, "attention.head_count")
    }

    /// Heads of keys in the first layer.
    fn llama_model_n_head_kv(handle: *const Opaque) -> i32, or 0; {
        let model = model(handle)?;
        let number = model.number("attention.head_count_kv");
        let number = number.or_else(|| model.number("attention.head_count"));
        Ok(number.map_or(0, |number| number as i32))
    }

    /// The window that layers look through; 0 if they look at everything.
    fn llama_model_n_swa(handle: *const Opaque) -> i32, or 0; {
        let model = model(handle)?;
        let layers = model.spec().into_iter().flat_map(|spec| &spec.layers);
        let sizes = layers.filter_map(|layer| layer.attention()?.span.size());
        Ok(sizes.max().map_or(0, |size| size as i32))
    }

    /// The factor of positions that it was trained with.
    fn llama_model_rope_freq_scale_train(handle: *const Opaque) -> f32, or 0.0; {
        let model = model(handle)?;
        let layers = model.spec().into_iter().flat_map(|spec| &spec.layers);
        let mut rotations = layers.filter_map(|layer| layer.attention()?.rotation.as_ref());
        Ok(rotations.next().map_or(1.0, |rotation| rotation.rope.freq_scale))
    }

    /// How many scores its classifier gives.
    fn llama_model_n_cls_out(handle: *const Opaque) -> u32, or 0; {
        Ok((model(handle)?.labels.len() as u32).max(1))
    }

    /// The label of a score.
    fn llama_model_cls_label(handle: *const Opaque, index: u32) -> *const c_char, or std::ptr::null(); {
        let model = model(handle)?;
        Ok(model.labels.get(index as usize).map_or(std::ptr::null(), |label| label.as_ptr()))
    }

    /// A value of the file as text.
    fn llama_model_meta_val_str(handle: *const Opaque, key: *const c_char, buffer: *mut c_char, size: usize) -> i32, or -1; {
        // SAFETY: the caller keeps to the header.
        unsafe { model(handle)?.readable.print_value_of(key, buffer, size) }
    }

    /// How many values are no lists.
    fn llama_model_meta_count(handle: *const Opaque) -> i32, or 0; {
        Ok(model(handle)?.readable.len() as i32)
    }

    /// A key by its number.
    fn llama_model_meta_key_by_index(handle: *const Opaque, index: i32, buffer: *mut c_char, size: usize) -> i32, or -1; {
        // SAFETY: the caller keeps to the header.
        unsafe { model(handle)?.readable.print_key(index, buffer, size) }
    }

    /// A value by its number.
    fn llama_model_meta_val_str_by_index(handle: *const Opaque, index: i32, buffer: *mut c_char, size: usize) -> i32, or -1; {
        // SAFETY: the caller keeps to the header.
        unsafe { model(handle)?.readable.print_value(index, buffer, size) }
    }

    /// The model in a few words.
    fn llama_model_desc(handle: *const Opaque, buffer: *mut c_char, size: usize) -> i32, or -1; {
        // SAFETY: the caller keeps to the header.
        Ok(unsafe { print(model(handle)?.description().as_bytes(), buffer, size) })
    }

    /// The type of most of its tensors, by the number of the file.
    fn llama_model_ftype(handle: *const Opaque) -> c_int, or 0; {
        Ok(model(handle)?.file_type())
    }

    /// Bytes of all tensors.
    fn llama_model_size(handle: *const Opaque) -> u64, or 0; {
        Ok(model(handle)?.bytes)
    }

    /// Elements of all tensors.
    fn llama_model_n_params(handle: *const Opaque) -> u64, or 0; {
        Ok(model(handle)?.n_params)
    }

    /// A chat template of the file, or null.
    fn llama_model_chat_template(handle: *const Opaque, name: *const c_char) -> *const c_char, or std::ptr::null(); {
        let model = model(handle)?;
        // SAFETY: the caller keeps to the header.
        let name = unsafe { text(name) };
        let name = name.map_or("".into(), |name| name.to_string_lossy());
        let found = model.templates.iter().find(|known| known.0 == name);
        Ok(found.map_or(std::ptr::null(), |(_, source)| source.as_ptr()))
    }

    /// Whether it has an encoder of its own: no such model is there.
    fn llama_model_has_encoder(handle: *const Opaque) -> bool, or false; {
        model(handle).map(|_| false)
    }

    /// Whether it is decoded.
    fn llama_model_has_decoder(handle: *const Opaque) -> bool, or false; {
        model(handle).map(|_| true)
    }

    /// The token that a decoder behind an encoder begins with: there is none.
    fn llama_model_decoder_start_token(handle: *const Opaque) -> i32, or -1; {
        model(handle).map(|_| -1)
    }

    /// Whether it keeps nothing but a state.
    fn llama_model_is_recurrent(handle: *const Opaque) -> bool, or false; {
        Ok(model(handle)?.keeps() == [true, false])
    }

    /// Whether it keeps a state, and single tokens, too.
    fn llama_model_is_hybrid(handle: *const Opaque) -> bool, or false; {
        Ok(model(handle)?.keeps() == [true, true])
    }

    /// Whether it fills in masks anywhere in a text.
    fn llama_model_is_diffusion(handle: *const Opaque) -> bool, or false; {
        const DIFFUSION: [&str; 4] = ["dream", "llada", "llada-moe", "rnd1"];
        Ok(DIFFUSION.contains(&&*model(handle)?.architecture))
    }

    /// Writes a model to a file: not supported.
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
