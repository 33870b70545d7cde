//! Backends to use.

use crate::args::RegistryArgs;
use samite::registry::{BuiltIn, DISABLE_VARIABLE, GgmlOptions, Pool, Registry};
#[cfg(feature = "remote")]
use samite::registry::{RemoteBackend, RemoteOptions};
use std::sync::Arc;
#[cfg(feature = "remote")]
use std::time::Duration;

/// Backends that flags and the environment name.
#[derive(Clone)]
pub struct BackendSetup {
    /// Options without CPU threads.
    options: BuiltIn,
    #[cfg(feature = "remote")]
    remote_wait: Duration,
}

impl BackendSetup {
    /// Resolves the flags.
    pub fn new(args: &RegistryArgs) -> Self {
        let mut options = BuiltIn::default();
        options.rpc.clone_from(&args.rpc);
        #[cfg(feature = "remote")]
        {
            options.remote.clone_from(&args.remote.remote);
            options.remote_client = RemoteOptions {
                token: args.remote.remote_token.clone(),
                ..RemoteOptions::default()
            };
        }
        options.ggml = GgmlOptions::from_environment();
        // A relative path on the command line refers to the current folder.
        let plugins = args.plugin.iter();
        let plugins = plugins.map(|path| std::path::absolute(path).unwrap_or(path.clone()));
        options.ggml.paths.splice(0..0, plugins);
        options.ggml.prober = prober();
        let variable = std::env::var(DISABLE_VARIABLE).unwrap_or_default();
        for list in args.disable.iter().chain([&variable]) {
            options.disable(list);
        }
        BackendSetup {
            options,
            #[cfg(feature = "remote")]
            remote_wait: Duration::from_secs(args.remote.remote_wait.into()),
        }
    }

    /// Returns the devices with the default number of CPU threads.
    pub fn registry(&self) -> Registry {
        self.registry_with(None, None)
    }

    /// Returns the devices with an existing pool of CPU threads.
    pub fn registry_on(&self, pool: Pool) -> Registry {
        self.registry_with(Some(pool.threads()), Some(Arc::new(pool)))
    }

    fn registry_with(&self, threads: Option<usize>, pool: Option<Arc<Pool>>) -> Registry {
        let mut options = self.options.clone();
        options.cpu.threads = threads;
        options.cpu.pool = pool;
        options.ggml.threads = Some(threads.unwrap_or_else(samite::registry::allowed_threads));
        Registry::built_in(options)
    }

    /// Returns the time to wait for lost servers, or `None` if none are in use.
    #[cfg(feature = "remote")]
    pub fn remote_wait(&self) -> Option<Duration> {
        let is_used = !self.options.remote.is_empty() && !self.remote_wait.is_zero();
        is_used.then_some(self.remote_wait)
    }

    /// Returns a server that is unreachable now, and the reason.
    #[cfg(feature = "remote")]
    pub fn unreachable(&self) -> Option<String> {
        let mut servers = self.options.remote.iter();
        servers.find_map(|address| {
            let place = address.split('#').next().unwrap_or_default();
            let why = RemoteBackend::check(address, &self.options.remote_client).err()?;
            Some(format!("{place}: {why}"))
        })
    }
}

/// Returns the command that tries a plugin whose path is appended: `samite probe-plugin`.
fn prober() -> Option<Vec<std::ffi::OsString>> {
    let program = std::env::current_exe().ok()?;
    Some(vec![program.into(), "probe-plugin".into()])
}
