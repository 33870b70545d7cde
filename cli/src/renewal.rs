//! Recovers from lost servers: loads the model again and recreates its context.

use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::ranks;
use crate::setup::ModelSetup;
use crate::shown::{one_line, say};
use samite::CancelToken;
use samite::llm::{Context, ContextOptions, Error, Model, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time between attempts.
const PAUSE: Duration = Duration::from_millis(250);

/// Maximum number of attempts to load the model from servers that are reachable.
const MAX_LOADS: usize = 3;

/// Returns the time to wait for lost servers of a setup, or `None` if none are in use.
fn patience(model: &ModelSetup) -> Option<Duration> {
    #[cfg(feature = "remote")]
    return model.devices.backends.remote_wait();
    #[cfg(not(feature = "remote"))]
    {
        let _ = model;
        None
    }
}

/// Returns a server of a setup that is unreachable, and the reason.
fn unreachable(model: &ModelSetup) -> Option<String> {
    #[cfg(feature = "remote")]
    return model.devices.backends.unreachable();
    #[cfg(not(feature = "remote"))]
    {
        let _ = model;
        None
    }
}

/// Loads a model. If a server is lost meanwhile and comes back in time, loads it again.
///
/// # Errors
/// Returns the errors of [`ModelSetup::load`]. Also fails if the server does not come back, or on
/// cancellation.
pub fn load(model: &ModelSetup, cpu: &CpuArgs, cancel: &CancelToken) -> CommandResult<Arc<Model>> {
    patiently(model, cancel, || model.load(cpu, cancel))
}

/// Makes a context for a model that was loaded with this setup. If a server is lost meanwhile and
/// comes back in time, loads the model again.
///
/// # Errors
/// Returns the errors of [`ModelSetup::context`]. Also fails if the server does not come back, or
/// on cancellation.
pub fn context(
    setup: &ModelSetup,
    cpu: &CpuArgs,
    model: Arc<Model>,
    options: ContextOptions,
) -> CommandResult<Context> {
    let cancel = options.cancel.clone();
    let mut loaded = Some(model);
    patiently(setup, &cancel, || {
        let model = match loaded.take() {
            Some(model) => model,
            None => setup.load(cpu, &cancel)?,
        };
        setup.context(model, options.clone())
    })
}

/// Runs an action, and repeats it each time that a server was lost and came back.
fn patiently<T>(
    model: &ModelSetup,
    cancel: &CancelToken,
    mut attempt: impl FnMut() -> CommandResult<T>,
) -> CommandResult<T> {
    // Several processes would have to restart together.
    let wait = patience(model).filter(|_| ranks::group().is_none());
    let Some(wait) = wait else {
        return attempt();
    };
    let (start, seconds) = (Instant::now(), wait.as_secs());
    let mut loads = 0;
    loop {
        loads += 1;
        let lost = match attempt() {
            Err(CommandError::Lost(lost)) if loads < MAX_LOADS => one_line(&lost),
            made => return made,
        };
        say(format_args!(
            "{lost}; waiting up to {seconds} s for it to come back"
        ));
        while let Some(why) = unreachable(model) {
            cancel.check()?;
            if start.elapsed() >= wait {
                return Err(CommandError::error(format_args!(
                    "{lost}; it did not come back within {seconds} s: {why}"
                )));
            }
            std::thread::sleep(PAUSE);
        }
        say("it is back: the model is loaded again");
    }
}

/// Recreates contexts with the same setup.
pub struct Renewal {
    model: ModelSetup,
    cpu: CpuArgs,
    /// Options without adapters.
    options: ContextOptions,
    cancel: CancelToken,
    wait: Duration,
}

impl Renewal {
    /// Creates a renewal for a model with this setup. Returns `None` if the model uses no servers
    /// that could come back. The contexts have `n_ctx` cells, whatever the free memory at that
    /// time.
    pub fn new(
        model: &ModelSetup,
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

    /// Waits until all servers are reachable, and loads the model again.
    ///
    /// # Errors
    /// Returns an error if a server does not come back in time or has no room for the model, or on
    /// cancellation.
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
                    Err(CommandError::Interrupted) => return Err(samite::Error::Cancelled.into()),
                    // A server may have been lost again meanwhile.
                    Err(failure) if loads >= MAX_LOADS => {
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

    fn context(&self) -> Result<Context, CommandError> {
        let model = self.model.load(&self.cpu, &self.cancel)?;
        self.model.context(model, self.options.clone())
    }
}
