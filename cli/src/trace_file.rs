//! A trace of what runs when, written while it runs: in memory there is only what came since the last piece of text.

use crate::failure::Outcome;
use crate::files::cannot_write;
use samite::gguf::AtomicFile;
use samite::llm::Context;
use samite::sched::Trace;
use serde_json::{Value, json};
use std::io::Write;
use std::time::Instant;

/// A file in Chrome's trace event format.
pub struct TraceFile {
    file: AtomicFile,
    /// When the recording began, and its latest part.
    begin: Instant,
    part: Instant,
    /// Names of tracks, by number.
    tracks: Vec<String>,
    is_empty: bool,
}

impl TraceFile {
    /// Begins to record what `context` runs.
    pub fn start(file: AtomicFile, context: &mut Context) -> Outcome<Self> {
        let now = Instant::now();
        let mut trace = TraceFile {
            file,
            begin: now,
            part: now,
            tracks: Vec::new(),
            is_empty: true,
        };
        trace.put("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        context.scheduler_mut().start_trace();
        Ok(trace)
    }

    /// Writes what `context` ran since the last time.
    pub fn advance(&mut self, context: &mut Context) -> Outcome {
        let scheduler = context.scheduler_mut();
        let trace = scheduler.finish_trace();
        let part = std::mem::replace(&mut self.part, Instant::now());
        scheduler.start_trace();
        trace.map_or(Ok(()), |trace| self.add(&trace, part))
    }

    /// Writes the rest, and gives the file its name.
    pub fn finish(mut self, context: &mut Context) -> Outcome {
        if let Some(trace) = context.scheduler_mut().finish_trace() {
            self.add(&trace, self.part)?;
        }
        self.put("]}\n")?;
        Ok(self.file.commit()?)
    }

    /// Adds the events of a part, whose times are counted from its own beginning and whose tracks have their own numbers.
    fn add(&mut self, trace: &Trace, begin: Instant) -> Outcome {
        let shift = begin.duration_since(self.begin).as_nanos() as f64 / 1000.0;
        let mut json = trace.to_json();
        let Some(Value::Array(events)) = json.get_mut("traceEvents").map(Value::take) else {
            return Ok(());
        };
        let mut numbers = Vec::new();
        for mut event in events {
            if event["ph"] == "M" {
                let name = event["args"]["name"].as_str().unwrap_or_default();
                let known = self.tracks.iter().position(|track| track == name);
                numbers.push(known.unwrap_or(self.tracks.len()));
                if known.is_some() {
                    continue;
                }
                self.tracks.push(name.to_owned());
                event["tid"] = json!(self.tracks.len() - 1);
            } else {
                let number = event["tid"].as_u64().unwrap_or(0) as usize;
                event["tid"] = json!(numbers.get(number));
                event["ts"] = json!(event["ts"].as_f64().unwrap_or(0.0) + shift);
            }
            let separator = if self.is_empty { "\n" } else { ",\n" };
            self.is_empty = false;
            self.put(&format!("{separator}{event}"))?;
        }
        Ok(())
    }

    fn put(&mut self, text: &str) -> Outcome {
        let written = self.file.write_all(text.as_bytes());
        written.map_err(|error| cannot_write(&self.file, &error))
    }
}
