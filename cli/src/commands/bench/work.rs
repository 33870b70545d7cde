//! The work to measure, and how samite does it.

use crate::failure::CommandResult;
use crate::setup::ModelSetup;
use samite::llm::{Batch, Context, Model};
use samite::registry::Peaks;
use samite::{CancelToken, DeviceLimits};
use std::sync::Arc;
use std::time::Instant;

/// A piece of work whose speed is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BenchCase {
    /// True for prefill, false for decode.
    pub is_prompt: bool,
    /// Tokens per sequence.
    pub tokens: usize,
    /// Tokens of each sequence that are in the context beforehand.
    pub depth: usize,
    /// Number of sequences that are decoded together.
    pub sequences: usize,
}

impl BenchCase {
    pub fn name(self) -> String {
        let kind = if self.is_prompt { "pp" } else { "tg" };
        let depth = match self.depth {
            0 => String::new(),
            depth => format!("@{depth}"),
        };
        let sequences = match self.sequences {
            1 => String::new(),
            sequences => format!("x{sequences}"),
        };
        format!("{kind}{}{sequences}{depth}", self.tokens)
    }

    /// Returns the number of context cells that it needs.
    pub fn cells(self) -> usize {
        (self.depth + self.tokens).saturating_mul(self.sequences)
    }

    /// Returns the machine's limiting resource for this work, which is arithmetic for prefill and
    /// memory reads for decode, and the rate in tokens per second at which it is reached. Attention
    /// and the KV cache are ignored.
    pub fn limit_of_device(self, model: &Model, limits: &DeviceLimits) -> (&'static str, f64) {
        // The device multiplies in F32.
        let peaks = Peaks {
            threads: 0,
            clock_hz: 0.0,
            read_bytes: limits.read_bytes,
            f32_operations: limits.f32_operations,
            i8_operations: None,
        };
        self.limit(model, &peaks)
    }

    /// Works like [`limit_of_device`](BenchCase::limit_of_device), for the CPU.
    pub fn limit(self, model: &Model, peaks: &Peaks) -> (&'static str, f64) {
        let cost = model.token_cost();
        if !self.is_prompt {
            let rate = peaks.read_bytes / cost.read_bytes;
            return ("reading", rate * self.sequences as f64);
        }
        let name = match peaks.i8_operations {
            Some(_) if cost.quantized_products > cost.float_products => "8-bit products",
            _ => "f32 arithmetic",
        };
        let quantized_peak = peaks.i8_operations.unwrap_or(peaks.f32_operations);
        let seconds = 2.0 * cost.quantized_products / quantized_peak
            + 2.0 * cost.float_products / peaks.f32_operations;
        (name, 1.0 / seconds)
    }
}

/// samite at one piece of work, with all unmeasured preparations done.
pub struct BenchRunner {
    context: Context,
    work: BenchCase,
    n_vocab: u32,
    batch: Batch,
}

impl BenchRunner {
    /// Creates a context, fills it to the depth, and warms up.
    pub fn new(
        model: &Arc<Model>,
        work: BenchCase,
        setup: &ModelSetup,
        cancel: &CancelToken,
    ) -> CommandResult<Self> {
        let mut options = setup.context_options(cancel);
        let needed = work.cells();
        options.n_ctx = Some(options.n_ctx.map_or(needed, |n_ctx| n_ctx.max(needed)));
        options.n_seq = work.sequences;
        let mut bench = BenchRunner {
            context: setup.context(Arc::clone(model), options)?,
            work,
            n_vocab: model.spec().n_vocab as u32,
            batch: Batch::new(),
        };
        for sequence in 0..work.sequences {
            bench.prompt(sequence, 0, work.depth)?;
        }
        bench.sample()?;
        Ok(bench)
    }

    /// Does the work once. Returns tokens of all sequences per second.
    pub fn sample(&mut self) -> CommandResult<f64> {
        let BenchCase { tokens, depth, .. } = self.work;
        for sequence in 0..self.work.sequences {
            self.context
                .kv_cache_mut()
                .remove(sequence, depth as i32..)?;
        }
        let start = Instant::now();
        if self.work.is_prompt {
            self.prompt(0, depth, tokens)?;
        } else {
            for position in depth..depth + tokens {
                self.batch.clear();
                for sequence in 0..self.work.sequences {
                    let id = self.token(position + sequence);
                    self.batch
                        .add(id, position as i32, &[sequence as u32], true);
                }
                self.context.decode(&self.batch)?;
            }
        }
        Ok((tokens * self.work.sequences) as f64 / start.elapsed().as_secs_f64())
    }

    /// Returns an arbitrary token: the speed does not depend on it.
    fn token(&self, i: usize) -> u32 {
        (i as u32).wrapping_mul(2_654_435_761) % self.n_vocab
    }

    fn prompt(&mut self, sequence: usize, from: usize, count: usize) -> CommandResult {
        let step = self.context.options().n_batch;
        let end = from + count;
        for start in (from..end).step_by(step) {
            let ids: Vec<u32> = (start..end.min(start + step))
                .map(|i| self.token(i))
                .collect();
            let batch = Batch::sequence(&ids, start as i32, sequence as u32);
            self.context.decode(&batch)?;
        }
        Ok(())
    }
}
