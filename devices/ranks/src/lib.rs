//! Connects processes that share a model: through MPI, or through memory that processes of one machine share.
//!
//! [`mpi::start`] and [`shared::start`] give a [`Transport`](samite_meta::comm::Transport). Who started the processes, and as how many, their environment
//! says: [`Launch`].
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
