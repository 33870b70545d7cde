//! Connects processes through MPI.
//!
//! The library is loaded at run time, so one binary works with Open MPI, with MPICH and libraries
//! with its ABI (Intel MPI, MVAPICH, Cray MPICH), and without any. The launcher decides which one
//! is preferred.
//!
//! A gather operation is `MPI_Iallgatherv`, polled with `MPI_Test`, so only MPI's initialization
//! and finalization block on other processes. A single thread at a time calls MPI.

#[cfg(unix)]
mod library;
#[cfg(unix)]
mod transport;

use crate::Launch;
use samite_meta::comm::Transport;

/// Environment variable with the path of a library to use instead of the default ones.
pub const PATH_VARIABLE: &str = "SAMITE_MPI_PATH";

/// Reason why MPI cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MpiError {
    /// No library was found.
    #[error(
        "no MPI library was found ({0}): install Open MPI or MPICH, the one whose mpirun starts samite, or name the library with {PATH_VARIABLE}"
    )]
    Missing(String),
    /// The library is of an unsupported kind.
    #[error(
        "{path}: '{version}' is neither Open MPI nor MPICH: name another library with {PATH_VARIABLE}"
    )]
    Unknown {
        /// Path of the library.
        path: String,
        /// Version string of the library.
        version: String,
    },
    /// MPI initialization failed.
    #[error("{path}: {what}")]
    Start {
        /// Path of the library.
        path: String,
        /// Error message of the library.
        what: String,
    },
    /// The library's number of processes differs from the launcher's.
    #[error(
        "{name} knows of {size} processes, but {launcher} started {started}: take the mpirun of that library (under Slurm: srun --mpi=pmix or pmi2), or name the library of that mpirun with {PATH_VARIABLE}"
    )]
    Size {
        /// Name of the library.
        name: String,
        /// Number of processes according to the library.
        size: usize,
        /// Launcher of the processes.
        launcher: crate::Launcher,
        /// Number of processes started.
        started: usize,
    },
}

/// Initializes MPI in this process, which is possible once.
///
/// # Errors
/// If no usable library is found, or it does not see the processes that were started.
#[cfg(unix)]
pub fn start(launch: Option<Launch>) -> Result<Box<dyn Transport>, MpiError> {
    let transport = library::start(launch)?;
    if let Some(Launch {
        launcher,
        size: Some(started),
        ..
    }) = launch
        && started != transport.size()
    {
        return Err(MpiError::Size {
            name: transport.name(),
            size: transport.size(),
            launcher,
            started,
        });
    }
    Ok(transport)
}

/// Reports that MPI is unsupported on this system.
///
/// # Errors
/// Always.
#[cfg(not(unix))]
pub fn start(_: Option<Launch>) -> Result<Box<dyn Transport>, MpiError> {
    let why = "samite looks for none on this system";
    Err(MpiError::Missing(why.to_owned()))
}
