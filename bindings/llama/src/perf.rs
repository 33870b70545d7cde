//! Performance counters.

use crate::context::context;
use crate::entry::export;
use crate::layout::{Opaque, PerfContext};
use crate::log::{self, Level};
use crate::names::now_us;

/// Counters of a context.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    start_us: i64,
    load_us: i64,
    prompt: (i64, i32),
    steps: (i64, i32),
}

impl Times {
    /// Creates zeroed counters.
    pub fn new(start_us: i64, load_us: i64) -> Self {
        Times {
            start_us,
            load_us,
            prompt: (0, 0),
            steps: (0, 0),
        }
    }

    /// Counts a batch.
    pub fn add(&mut self, tokens: i32, took_us: i64) {
        let (time, count) = match tokens {
            1 => &mut self.steps,
            _ => &mut self.prompt,
        };
        *time += took_us;
        *count = count.saturating_add(tokens);
    }

    fn data(&self) -> PerfContext {
        let ms = |us: i64| us as f64 * 1e-3;
        PerfContext {
            t_start_ms: ms(self.start_us),
            t_load_ms: ms(self.load_us),
            t_p_eval_ms: ms(self.prompt.0),
            t_eval_ms: ms(self.steps.0),
            n_p_eval: self.prompt.1.max(1),
            n_eval: self.steps.1.max(1),
            n_reused: 0,
        }
    }
}

export! {
    /// Returns the performance counters.
    fn llama_perf_context(handle: *const Opaque) -> PerfContext, or PerfContext::default(); {
        if handle.is_null() {
            return Ok(PerfContext::default());
        }
        Ok(context(handle)?.lock().times.data())
    }

    /// Writes the performance counters to the log.
    fn llama_perf_context_print(handle: *const Opaque), or (); {
        let data = context(handle)?.lock().times.data();
        let per_token = |ms: f64, count: i32| {
            let count = f64::from(count);
            format!(
                "({:8.2} ms per token, {:8.2} tokens per second)",
                ms / count,
                count * 1e3 / ms
            )
        };
        let say =
            |text: String| log::line(Level::Info, &format!("llama_perf_context_print: {text}"));
        say(format!("       load time = {:10.2} ms", data.t_load_ms));
        say(format!(
            "prompt eval time = {:10.2} ms / {:5} tokens {}",
            data.t_p_eval_ms,
            data.n_p_eval,
            per_token(data.t_p_eval_ms, data.n_p_eval)
        ));
        say(format!(
            "       eval time = {:10.2} ms / {:5} runs   {}",
            data.t_eval_ms,
            data.n_eval,
            per_token(data.t_eval_ms, data.n_eval)
        ));
        let total = now_us() as f64 * 1e-3 - data.t_start_ms;
        say(format!(
            "      total time = {total:10.2} ms / {:5} tokens",
            data.n_p_eval + data.n_eval
        ));
        Ok(())
    }

    /// Resets the performance counters.
    fn llama_perf_context_reset(handle: *mut Opaque), or (); {
        let context = context(handle)?;
        let mut state = context.lock();
        state.times = Times::new(now_us(), state.times.load_us);
        Ok(())
    }
}
