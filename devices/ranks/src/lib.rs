//! Connects processes that share a model, through MPI or through shared memory on one machine.
//!
//! [`mpi::start`] and [`shared::start`] return a [`Transport`](samite_meta::comm::Transport).
//! [`Launch`] reads the launcher and the number of processes from the environment.
//!
//! | file | content |
//! |---|---|
//! | `launch` | launcher, rank and number of ranks of this process |
//! | `mpi` | MPI: loads a library, detects its kind (`mpi/library`), and runs gather operations (`mpi/transport`) |
//! | `shared` | a memory-mapped file that all ranks share |

mod launch;
pub mod mpi;
pub mod shared;

pub use launch::{Launch, Launcher};
