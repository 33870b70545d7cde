//! Connects processes through MPI.
//!
//! The library is found at run time, so one program works with Open MPI, with MPICH and what has its binary interface (Intel MPI, MVAPICH, Cray MPICH),
//! and without any. Which one is wanted follows from who started the processes.
//!
//! A gathering is `MPI_Iallgatherv`, and `MPI_Test` asks whether it is done, so nothing here waits for another process but the beginning and the end of
//! MPI. One thread at a time calls MPI.

#[cfg(unix)]
mod library;
#[cfg(unix)]
mod transport;

use crate::Launch;
use samite_meta::comm::Transport;

/// The environment variable with the path of a library to use instead of the usual ones.
pub const PATH_VARIABLE: &str = "SAMITE_MPI_PATH";

/// Why MPI cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MpiError {
    /// No library was found.
    #[error(
        "no MPI library was found ({0}): install Open MPI or MPICH, the one whose mpirun starts samite, or name the library with {PATH_VARIABLE}"
    )]
    Missing(String),
    /// It is neither of the kinds that are known.
    #[error(
        "{path}: '{version}' is neither Open MPI nor MPICH: name another library with {PATH_VARIABLE}"
    )]
    Unknown {
        /// The library.
        path: String,
        /// What it says that it is.
        version: String,
    },
    /// It refuses to begin.
    #[error("{path}: {what}")]
    Start {
        /// The library.
        path: String,
        /// What it says.
        what: String,
    },
    /// It knows of fewer or more processes than there are.
    #[error(
        "{name} knows of {size} processes, but {launcher} started {started}: take the mpirun of that library (under Slurm: srun --mpi=pmix or pmi2), or name the library of that mpirun with {PATH_VARIABLE}"
    )]
    Size {
        /// The library.
        name: String,
        /// What it says.
        size: usize,
        /// Who started the processes.
        launcher: crate::Launcher,
        /// How many.
        started: usize,
    },
}

/// Begins MPI in this process. That is possible once.
///
/// # Errors
/// If there is no library that can be used, or it does not know of the processes that were started.
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

/// Begins MPI, on other systems.
///
/// # Errors
/// Always.
#[cfg(not(unix))]
pub fn start(_: Option<Launch>) -> Result<Box<dyn Transport>, MpiError> {
    let why = "samite looks for none on this system";
    Err(MpiError::Missing(why.to_owned()))
}
