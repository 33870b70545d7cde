//! Contexts of a model.

use super::ModelSetup;
use crate::args::ContextArgs;
use crate::failure::{CommandError, CommandResult};
use crate::ranks;
use crate::shown::say;
use samite::llm::{Context, ContextOptions, ContextPlan, Error, Model};
use samite::{CancelToken, DType};
use std::sync::Arc;

/// Options of contexts that flags set.
#[derive(Clone, Debug)]
pub struct ContextSetup {
    /// Context size in tokens, or `None` if the choice is left to samite.
    pub n_ctx: Option<usize>,
    /// Maximum number of tokens computed at once.
    pub n_ubatch: usize,
    /// Types of cached keys and values.
    pub kv_types: [DType; 2],
    /// True if attention is one operation.
    pub flash: bool,
    full_windows: bool,
    offload: bool,
    copies: usize,
}

impl ContextSetup {
    /// Resolves the flags.
    ///
    /// # Errors
    /// Returns an error for values that the flags' types cannot exclude.
    pub fn new(args: &ContextArgs) -> CommandResult<Self> {
        let kv_types = kv_types(args)?;
        Ok(ContextSetup {
            n_ctx: args.ctx_size.filter(|&n_ctx| n_ctx > 0),
            n_ubatch: args.ubatch_size,
            kv_types,
            flash: !args.no_flash,
            full_windows: args.swa_full,
            offload: !args.no_op_offload,
            copies: usize::from(args.copies),
        })
    }
}

fn kv_types(args: &ContextArgs) -> CommandResult<[DType; 2]> {
    let dtype = |flag: &str, name: &str| {
        DType::from_name(name.trim()).ok_or_else(|| {
            CommandError::usage(format_args!(
                "{flag}: '{name}' is not a type; try f16, f32 or q8_0"
            ))
        })
    };
    let (keys, values) = args.kv.split_once(',').unwrap_or((&args.kv, &args.kv));
    let choose = |flag, special: &Option<String>, both| match special {
        Some(name) => dtype(flag, name),
        None => dtype("--kv", both),
    };
    Ok([
        choose("--cache-type-k", &args.cache_type_k, keys)?,
        choose("--cache-type-v", &args.cache_type_v, values)?,
    ])
}

impl ModelSetup {
    /// Returns the context options that the flags set.
    pub fn context_options(&self, cancel: &CancelToken) -> ContextOptions {
        let flags = &self.context;
        ContextOptions {
            n_ctx: flags.n_ctx,
            n_ubatch: flags.n_ubatch,
            kv_types: flags.kv_types,
            flash: flags.flash,
            full_windows: flags.full_windows,
            offload: flags.offload,
            copies: flags.copies,
            fallback: self.placement.fallback,
            cancel: cancel.clone(),
            ..ContextOptions::default()
        }
    }

    /// Creates a context for `model` with the adapters that the flags name.
    pub fn context(&self, model: Arc<Model>, options: ContextOptions) -> CommandResult<Context> {
        let options = self.with_adapters(&model, options)?;
        Context::new(model, options).map_err(|error| match error {
            Error::Core(error @ samite::Error::OutOfMemory { .. }) => CommandError::error(
                format_args!("{error}; see --ctx-size (-c) and --ubatch-size (-ub)"),
            ),
            error => error.into(),
        })
    }

    /// Works like [`context`](Self::context), but only plans.
    pub fn context_plan(
        &self,
        model: Arc<Model>,
        options: ContextOptions,
    ) -> CommandResult<ContextPlan> {
        let options = self.with_adapters(&model, options)?;
        Ok(ContextPlan::new(model, options)?)
    }

    fn with_adapters(
        &self,
        model: &Arc<Model>,
        mut options: ContextOptions,
    ) -> CommandResult<ContextOptions> {
        options.output = options.output.resolve(model.spec());
        options.adapters.extend(self.adapters.load(model)?);
        if options.n_ctx.is_none() {
            options.n_ctx = self.default_context(model, &options)?;
        }
        Ok(options)
    }

    /// Returns the context size to use without `-c`; `None` for the library's default.
    fn default_context(
        &self,
        model: &Arc<Model>,
        options: &ContextOptions,
    ) -> CommandResult<Option<usize>> {
        let trained = model.spec().n_ctx_train;
        // Processes that share a model may have different amounts of memory.
        if ranks::group().is_some() || self.shares_memory {
            return Ok(None);
        }
        let Some(margin) = self.placement.fit_margin else {
            return Ok(Some(trained));
        };
        let n_ctx = options.longest_context(model, margin)?;
        let least = trained.min(ContextOptions::DEFAULT_CONTEXT);
        let chosen = n_ctx.unwrap_or(least);
        if chosen < trained {
            say(format_args!(
                "the context has {chosen} of the model's {trained} tokens{}; -c sets another size",
                if chosen > least {
                    ", as many as free memory allows"
                } else {
                    ""
                }
            ));
        }
        Ok(Some(chosen))
    }
}
