//! Training: not supported.

use crate::entry::{Failure, export};
use crate::layout::{Opaque, OptParams};
use std::ffi::c_void;

export! {
    /// Returns whether a tensor is trained: always true.
    fn llama_opt_param_filter_all(_tensor: *const c_void, _data: *mut c_void) -> bool, or true; {
        Ok(true)
    }

    /// Starts a training: not supported.
    fn llama_opt_init(context: *mut Opaque, _model: *mut Opaque, _params: OptParams), or (); {
        crate::context::context(context)?;
        Err(Failure::unsupported("training; use `samite train`"))
    }

    /// Trains for an epoch: not supported.
    fn llama_opt_epoch(
        context: *mut Opaque, _data: *mut c_void, _trained: *mut c_void, _evaluated: *mut c_void,
        _split: i64, _train: *const c_void,
        _evaluate: *const c_void
    ), or (); {
        crate::context::context(context)?;
        Err(Failure::unsupported("training; use `samite train`"))
    }
}
