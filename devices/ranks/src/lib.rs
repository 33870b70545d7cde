//! Connects processes that share a model, through MPI or through shared memory on one machine.
//!
//! [`mpi::start`] and [`shared::start`] return a [`Transport`](samite_meta::comm::Transport).
//! [`Launch`] reads the launcher and the number of processes from the environment.
//!
//! | file | what |
//! |---|---|
//! | `launch` | who started this process, and as one of how many |
//! | `mpi` | MPI: finds a library, tells its kind, has its functions (`mpi/library`), and gathers with them (`mpi/transport`) |
//! | `shared` | a file in memory that all map |

mod launch;
pub mod mpi;
pub mod shared;

pub use launch::{Launch, Launcher};
