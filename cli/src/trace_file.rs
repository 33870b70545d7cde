//! Writes a trace while the program runs, so that memory holds only the newest part.

use crate::failure::CommandResult;
use crate::files::cannot_write;
use samite::gguf::AtomicFile;
use samite::llm::Context;
use samite::sched::Trace;
use std::io::Write;

/// A file in Chrome's trace event format.
pub struct TraceFile {
    file: AtomicFile,
    is_empty: bool,
}

impl TraceFile {
    /// Starts to record the runs of `context`.
    pub fn start(file: AtomicFile, context: &mut Context) -> CommandResult<Self> {
        let mut trace = TraceFile {
            file,
            is_empty: true,
        };
        trace.put("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        context.scheduler_mut().start_trace();
        Ok(trace)
    }

    /// Writes the events of `context` since the last call.
    pub fn advance(&mut self, context: &mut Context) -> CommandResult {
        match context.scheduler().trace() {
            Some(trace) => self.add(trace),
            None => Ok(()),
        }
    }

    /// Writes the rest, and renames the file to its final name.
    pub fn finish(mut self, context: &mut Context) -> CommandResult {
        // Asynchronous devices report their nodes when they are synchronized.
        context
            .scheduler_mut()
            .synchronize()
            .map_err(samite::llm::Error::from)?;
        if let Some(trace) = context.scheduler_mut().finish_trace() {
            self.add(&trace)?;
        }
        self.put("]}\n")?;
        Ok(self.file.commit()?)
    }

    fn add(&mut self, trace: &Trace) -> CommandResult {
        for event in trace.take_events() {
            let separator = if self.is_empty { "\n" } else { ",\n" };
            self.is_empty = false;
            self.put(&format!("{separator}{event}"))?;
        }
        Ok(())
    }

    fn put(&mut self, text: &str) -> CommandResult {
        let written = self.file.write_all(text.as_bytes());
        written.map_err(|error| cannot_write(&self.file, &error))
    }
}
