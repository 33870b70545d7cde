//! Servers that come back: a model whose device was lost is loaded again, and gets a context like the one before.

use crate::args::ModelArgs;
use crate::cpu_args::CpuArgs;
use crate::failure::{Failure, Outcome};
use crate::ranks;
use crate::shown::{one_line, say};
use samite::CancelToken;
use samite::llm::{Context, ContextOptions, Error, Model, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often it is tried again.
const PAUSE: Duration = Duration::from_millis(250);

/// How often the model is loaded from servers that are there.
const MOST_LOADS: usize = 3;

/// How long to wait for servers of these flags that are lost, if there are any.
fn patience(model: &ModelArgs) -> Option<Duration> {
    #[cfg(feature = "remote")]
    return model.remote().wait();
    #[cfg(not(feature = "remote"))]
    {
        let _ = model;
        None
    }
}

/// A server of these flags that cannot be used, and why.
fn unreachable(model: &ModelArgs) -> Option<String> {
    #[cfg(feature = "remote")]
    return model.remote().unreachable();
    #[cfg(not(feature = "remote"))]
    {
        let _ = model;
        None
    }
}

/// Loads a model. If a server is lost meanwhile and comes back in time, it is loaded once more.
///
/// # Errors
/// As [`ModelArgs::load`]; if the server does not come back; when cancelled.
pub fn load(model: &ModelArgs, cpu: &CpuArgs, cancel: &CancelToken) -> Outcome<Arc<Model>> {
    patiently(model, cancel, || model.load(cpu, cancel))
}

/// Makes a context for a model that was loaded by these flags. If a server is lost meanwhile and comes back in time, the model is loaded once more.
///
/// # Errors
/// As [`ModelArgs::context`]; if the server does not come back; when cancelled.
pub fn context(
    flags: &ModelArgs,
    cpu: &CpuArgs,
    model: Arc<Model>,
    options: ContextOptions,
) -> Outcome<Context> {
    let cancel = options.cancel.clone();
    let mut loaded = Some(model);
    patiently(flags, &cancel, || {
        let model = match loaded.take() {
            Some(model) => model,
            None => flags.load(cpu, &cancel)?,
        };
        flags.context(model, options.clone())
    })
}

/// Does it, and once more each time that a server was lost meanwhile and came back.
fn patiently<T>(
    model: &ModelArgs,
    cancel: &CancelToken,
    mut attempt: impl FnMut() -> Outcome<T>,
) -> Outcome<T> {
    // Several processes would have to begin anew together.
    let wait = patience(model).filter(|_| ranks::group().is_none());
    let Some(wait) = wait else {
        return attempt();
    };
    let (start, seconds) = (Instant::now(), wait.as_secs());
    let mut loads = 0;
    loop {
        loads += 1;
        let lost = match attempt() {
            Err(Failure::Lost(lost)) if loads < MOST_LOADS => one_line(&lost),
            made => return made,
        };
        say(format_args!(
            "{lost}; waiting up to {seconds} s for it to come back"
        ));
        while let Some(why) = unreachable(model) {
            cancel.check()?;
            if start.elapsed() >= wait {
                return Err(Failure::error(format_args!(
                    "{lost}; it did not come back within {seconds} s: {why}"
                )));
            }
            std::thread::sleep(PAUSE);
        }
        say("it is back: the model is loaded again");
    }
}

/// Makes contexts anew, by the same flags.
pub struct Renewal {
    model: ModelArgs,
    cpu: CpuArgs,
    /// Without adapters.
    options: ContextOptions,
    cancel: CancelToken,
    wait: Duration,
}

impl Renewal {
    /// For a model by these flags; `None` if it has no servers that could come back.
    /// The contexts have `n_ctx` cells, whatever free memory would allow then.
    pub fn new(
        model: &ModelArgs,
        cpu: &CpuArgs,
        options: ContextOptions,
        n_ctx: usize,
    ) -> Option<Self> {
        let wait = patience(model)?;
        Some(Renewal {
            model: model.clone(),
            cpu: cpu.clone(),
            cancel: options.cancel.clone(),
            options: ContextOptions {
                n_ctx: Some(n_ctx),
                ..options
            },
            wait,
        })
    }

    /// Waits until all servers are there, and loads the model again.
    ///
    /// # Errors
    /// If a server does not come back in time, or has no room for the model; when cancelled.
    pub fn renew(&self, lost: &Error) -> Result<Context> {
        let start = Instant::now();
        let device = match lost {
            Error::Core(samite::Error::DeviceLost { device, .. }) => device.clone(),
            _ => "remote".into(),
        };
        let seconds = self.wait.as_secs();
        let lost = one_line(&lost.to_string());
        say(format_args!(
            "{lost}; waiting up to {seconds} s for it to come back"
        ));
        let failed = |message: String| {
            let message = message.into();
            Err(samite::Error::DeviceLost { device, message }.into())
        };
        let mut loads = 1;
        loop {
            let why = match unreachable(&self.model) {
                Some(why) => why,
                None => match self.context() {
                    Ok(context) => {
                        say("it is back: the model is loaded again, and the text goes on");
                        return Ok(context);
                    }
                    Err(Failure::Interrupted) => return Err(samite::Error::Cancelled.into()),
                    // It may have been lost again meanwhile.
                    Err(failure) if loads >= MOST_LOADS => {
                        let why = failure.text();
                        return failed(format!("the model cannot be loaded again: {why}"));
                    }
                    Err(failure) => {
                        loads += 1;
                        failure.text()
                    }
                },
            };
            self.cancel.check()?;
            if start.elapsed() >= self.wait {
                return failed(format!("it did not come back within {seconds} s: {why}"));
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn context(&self) -> Result<Context, Failure> {
        let model = self.model.load(&self.cpu, &self.cancel)?;
        self.model.context(model, self.options.clone())
    }
}
