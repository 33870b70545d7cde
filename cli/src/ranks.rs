//! Processes that share one model: started by `mpirun` or `srun` and connected by MPI, or connected
//! by shared memory.
//!
//! All processes do the same. A failure before the work begins is shared by [`together`] and
//! printed once, and all processes leave in order. A process that fails later ends the others.

use crate::failure::{CommandError, CommandResult};
use clap::Args;
use samite::gguf::GgufFile;
use samite::registry::ranks::shared::{self, SharedError};
use samite::registry::ranks::{Launch, Launcher, mpi};
use samite::registry::{ProcessGroup, ProcessOptions, Transport};
use std::borrow::Cow;
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

/// Flags for the shards of a divided model.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Placement")]
pub struct RankArgs {
    /// Communication between the members of --split-mode tensor: `threads` of this process; or
    /// processes, one per member, through `mpi` or, on one machine, `shared` memory. `auto`:
    /// processes if `mpirun`, `srun` or SAMITE_RANKS report several
    #[arg(long, value_enum, default_value_t = Communicator::Auto, value_name = "KIND")]
    communicator: Communicator,

    /// Seconds that the members of --split-mode tensor wait for each other before the run fails
    /// with an error
    #[arg(long, default_value = "30", value_name = "SECONDS",
        value_parser = clap::value_parser!(u32).range(1..=86400))]
    deadline: u32,
}

/// `--communicator`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Communicator {
    /// Chosen by the way this process was started
    Auto,
    /// Threads of one process
    Threads,
    /// Processes, through MPI; SAMITE_MPI_PATH names its library
    Mpi,
    /// Processes of one machine, through the file SAMITE_RANKS_FILE
    Shared,
}

/// The process group, if there are several processes. The connection belongs to the whole process.
static RANKS: OnceLock<ProcessGroup> = OnceLock::new();

/// Time limit for loading the model in all processes.
pub const LOADING: Duration = Duration::from_secs(1800);

impl RankArgs {
    /// Returns the time that shards wait for each other.
    pub fn deadline(&self) -> Duration {
        Duration::from_secs(self.deadline.into())
    }

    /// Returns the launcher of this process if it started several processes that share a model.
    fn launch(&self) -> Option<Launch> {
        match self.communicator {
            Communicator::Threads => None,
            _ => Launch::from_environment(),
        }
    }

    /// Fails if this process is one of several that are not connected.
    pub fn refuse(&self) -> CommandResult {
        match (self.launch(), self.communicator) {
            (None, Communicator::Auto | Communicator::Threads) => Ok(()),
            _ => Err(CommandError::usage(
                "several processes share a model with samite run only: take --communicator threads, and name the members with --device",
            )),
        }
    }

    /// Connects the processes if there are several.
    pub fn start(&self, splits_tensors: bool) -> CommandResult<Option<&'static ProcessGroup>> {
        let launch = self.launch();
        let launcher = launch.map(|launch| launch.launcher);
        let is_shared = match (self.communicator, launcher) {
            (Communicator::Threads, _) | (Communicator::Auto, None) => return Ok(None),
            (Communicator::Shared, _) | (Communicator::Auto, Some(Launcher::Variables)) => true,
            (Communicator::Mpi | Communicator::Auto, _) => false,
        };
        if !splits_tensors {
            let launcher = launcher.map_or("--communicator".to_owned(), |l| l.to_string());
            return Err(CommandError::usage(format_args!(
                "{launcher} says that there are several processes: add --split-mode tensor (-sm \
                 tensor), so that they share the model, or \
                 --communicator threads, so that each works alone",
            )));
        }
        let transport = if is_shared {
            self.share(launch)?
        } else {
            mpi::start(launch).map_err(CommandError::error)?
        };
        if transport.size() == 1 {
            return Err(CommandError::usage(
                "--communicator mpi: there is one process: start several, as in: mpirun -np 4 samite run -sm tensor",
            ));
        }
        let options = ProcessOptions {
            deadline: self.deadline(),
            cancel: crate::interrupt::token(),
            ..ProcessOptions::default()
        };
        let mut group = ProcessGroup::new(transport, options.clone());
        if self.communicator == Communicator::Auto
            && !is_shared
            && let Some(memory) = near(&group)?
        {
            let mpi = group.into_transport();
            let mpi = mpi.ok_or_else(|| CommandError::error("the processes are in use already"))?;
            group = ProcessGroup::new(shared::beside(memory, mpi), options);
        }
        tracing::info!(ranks = group.size(), through = group.name(), "processes");
        Ok(Some(RANKS.get_or_init(|| group)))
    }
}

/// Returns shared memory for all processes if they are on one machine and can all use it, because
/// it is faster than MPI there.
fn near(group: &ProcessGroup) -> CommandResult<Option<Box<dyn Transport>>> {
    /// Time limit for opening a file.
    const OPENING: Duration = Duration::from_secs(5);
    let time = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let name = format!("/dev/shm/samite-{}-{}", std::process::id(), time.as_nanos());
    let told = group.tell(format!("{}\n{name}", host()).as_bytes())?;
    let told = told.iter().map(|told| String::from_utf8_lossy(told));
    let told: Vec<_> = told.collect();
    let is_here = |told: &Cow<'_, str>| told.split('\n').next() == Some(host().as_str());
    let Some((_, path)) = told[0]
        .split_once('\n')
        .filter(|_| told.iter().all(is_here))
    else {
        return Ok(None);
    };
    let memory = shared::start(path.as_ref(), group.rank(), group.size(), OPENING);
    let all = group.tell(&[u8::from(memory.is_ok())])?;
    match memory {
        Ok(memory) if all.iter().all(|told| told == &[1]) => Ok(Some(memory)),
        Ok(_) => Ok(None),
        Err(error) => {
            tracing::info!(%error, "processes of one machine share no memory");
            Ok(None)
        }
    }
}

/// Returns the name of this machine.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        // If it is unknown, processes count as neighbours.
        "" => std::env::var("HOSTNAME").unwrap_or_default(),
        name => name.to_owned(),
    }
}

impl RankArgs {
    /// Shares memory with the other processes.
    fn share(&self, launch: Option<Launch>) -> CommandResult<Box<dyn Transport>> {
        let path = std::env::var_os(shared::PATH_VARIABLE);
        let (Some((size, rank)), Some(path)) =
            (launch.and_then(|launch| launch.size.zip(launch.rank)), path)
        else {
            let what = "the environment does not say which process this is";
            return Err(CommandError::usage(SharedError::Environment(
                what.to_owned(),
            )));
        };
        shared::start(path.as_ref(), rank, size, self.deadline()).map_err(CommandError::error)
    }
}

/// Returns the process group, if there are several connected processes.
pub fn group() -> Option<&'static ProcessGroup> {
    RANKS.get()
}

/// Returns the rank of this process, if there are several.
pub fn rank() -> Option<usize> {
    RANKS.get().map(ProcessGroup::rank)
}

/// Returns whether this process prints the output that all have in common.
pub fn is_first() -> bool {
    rank().is_none_or(|rank| rank == 0)
}

/// Waits until all processes get here. If one of them has failed, all fail. A failure may also be
/// common to all.
pub fn together<T>(within: Duration, result: CommandResult<T>) -> CommandResult<T> {
    let Some(group) = RANKS.get() else {
        return result;
    };
    let result = match result {
        Ok(value) => match group.wait_for_all(within) {
            Ok(()) => return Ok(value),
            Err(error) => Err(error.into()),
        },
        Err(failure) => {
            group.fail(&failure.text());
            Err(failure)
        }
    };
    match group.ended() {
        Some(reason) => Err(CommandError::Agreed(reason)),
        None => result,
    }
}

/// Returns the tokens of the first process. Waits for it without a time limit, because it may wait
/// for a user.
pub fn of_first(tokens: Vec<u32>) -> CommandResult<Vec<u32>> {
    let Some(group) = RANKS.get() else {
        return Ok(tokens);
    };
    group.wait_for_all(LOADING)?;
    let mine: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    let told = group.tell(if group.rank() == 0 { &mine } else { &[] })?;
    let (tokens, _) = told[0].as_chunks::<4>();
    Ok(tokens
        .iter()
        .map(|bytes| u32::from_le_bytes(*bytes))
        .collect())
}

/// Leaves the process group: in order if all know the reason, otherwise by ending the other
/// processes.
pub fn leave(exit_code: i32, is_done: bool) -> i32 {
    let Some(group) = RANKS.get() else {
        return exit_code;
    };
    if is_done || group.ended().is_some() {
        match group.finish() {
            Ok(()) => return exit_code,
            Err(error) => CommandError::error(error).report(),
        };
    }
    let exit_code = exit_code.max(1);
    wait_for_launcher();
    group.abort_all(exit_code);
    exit_code
}

/// Waits until the launcher has read what this process printed, for a second at most. MPICH's drops
/// the rest when a process ends the others.
fn wait_for_launcher() {
    for _ in 0..10 {
        // Read output still has to be passed on.
        std::thread::sleep(Duration::from_millis(100));
        #[cfg(unix)]
        if let Ok(1..) = rustix::io::ioctl_fionread(std::io::stderr()) {
            continue;
        }
        break;
    }
}

/// Returns a number that differs between models with different names, shapes, metadata or small
/// tensors, which must not be shared.
pub fn fingerprint(file: &GgufFile) -> CommandResult<u64> {
    /// Size of the largest tensor whose content is hashed.
    const SMALL: usize = 64 << 10;
    let mut hasher = DefaultHasher::new();
    for (key, value) in file.metadata().iter() {
        key.hash(&mut hasher);
        // Arrays of a tokenizer are large, so hash their text without storing it.
        let _ = write!(Hashing(&mut hasher), "{value:?}");
    }
    let mut bytes = Vec::new();
    for tensor in file.tensors().iter() {
        (&tensor.name, tensor.dtype, tensor.shape).hash(&mut hasher);
        if tensor.size <= SMALL {
            bytes.resize(tensor.size, 0);
            file.read_tensor_into(tensor, &mut bytes)?;
            bytes.hash(&mut hasher);
        }
    }
    Ok(hasher.finish())
}

/// Returns a hash of the debug text of a value.
pub fn hash(value: impl std::fmt::Debug) -> u64 {
    let mut hasher = DefaultHasher::new();
    let _ = write!(Hashing(&mut hasher), "{value:?}");
    hasher.finish()
}

/// Writes text into a hash.
struct Hashing<'a>(&'a mut DefaultHasher);

impl Write for Hashing<'_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}

/// Distribution of processes over machines.
pub struct Neighbours {
    /// Name of this machine.
    pub host: String,
    /// Number of lower ranks on it.
    pub before: usize,
    /// Number of processes on it.
    pub all: usize,
    /// Number of them that share the processors that this process may use.
    pub sharing: usize,
}

impl Neighbours {
    /// Gathers the distribution from all processes.
    pub fn ask(group: &ProcessGroup) -> CommandResult<Self> {
        let host = host();
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let allowed = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed:"))
            .unwrap_or_default()
            .trim();
        let told = group.tell(format!("{host}\n{allowed}").as_bytes())?;
        let told: Vec<String> = told
            .iter()
            .map(|told| String::from_utf8_lossy(told).into_owned())
            .collect();
        let mine = &told[group.rank()];
        let is_here = |other: &&String| other.split('\n').next() == Some(host.as_str());
        Ok(Neighbours {
            before: told[..group.rank()].iter().filter(is_here).count(),
            all: told.iter().filter(is_here).count(),
            sharing: told.iter().filter(|other| *other == mine).count(),
            host,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite::gguf::LoadMode;
    use samite::llm::SyntheticModel;

    #[test]
    fn slightly_different_models_have_different_fingerprints() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut seen = Vec::new();
        let mut add = |model: SyntheticModel| {
            model.write(&path).unwrap();
            let file = GgufFile::open_header(&path, LoadMode::Read).unwrap();
            let first = fingerprint(&file).unwrap();
            assert_eq!(first, fingerprint(&file).unwrap());
            assert!(!seen.contains(&first));
            seen.push(first);
        };
        let tiny = || SyntheticModel::tiny("llama");
        add(tiny());
        add(SyntheticModel {
            seed: tiny().seed + 1,
            ..tiny()
        });
        add(SyntheticModel {
            n_layer: tiny().n_layer + 1,
            ..tiny()
        });
        add(SyntheticModel::tiny("qwen2"));
    }
}
