//! Collective operations between the members of a group.
//!
//! A [`Communicator`] is one member's end of a group. All members make the same calls in the same
//! order, and each call synchronizes all of them. Sums are computed in the order of the members, so
//! all get the same bits. After a failure, the group is *poisoned*: every call fails, including
//! those that are waiting, until the group is reset.

pub mod played;
mod process;
mod spin_barrier;
mod threads;
mod transport;

pub use process::{ProcessGroup, ProcessOptions};
pub(crate) use threads::grow;
pub use threads::{ThreadCommunicator, ThreadGroup};
pub use transport::Transport;

use samite_core::{Error, Result};

/// One member's end of a group.
pub trait Communicator: Send {
    /// Returns the member's rank.
    fn rank(&self) -> usize;

    /// Returns the number of members.
    fn size(&self) -> usize;

    /// Replaces `x` with the sum over all members. All get the same bits.
    ///
    /// # Errors
    /// Returns an error if another member made a different call, failed, or did not arrive in time.
    /// The group is then poisoned.
    fn all_reduce(&mut self, x: &mut [f32]) -> Result<()>;

    /// Concatenates the data of all members into `out`, in the order of their ranks. `counts` are
    /// their sizes in bytes.
    ///
    /// # Errors
    /// Returns the errors of [`all_reduce`](Communicator::all_reduce).
    fn all_gather(&mut self, mine: &[u8], counts: &[usize], out: &mut [u8]) -> Result<()>;

    /// Replaces `bytes` with those of member `root`.
    ///
    /// # Errors
    /// Returns the errors of [`all_reduce`](Communicator::all_reduce).
    fn broadcast(&mut self, root: usize, bytes: &mut [u8]) -> Result<()>;

    /// Waits for all members.
    ///
    /// # Errors
    /// Returns the errors of [`all_reduce`](Communicator::all_reduce).
    fn barrier(&mut self) -> Result<()>;

    /// Poisons the group: this member cannot continue.
    fn abort(&self, reason: &str);
}

/// Checks the arguments of a gather.
fn check_gather(rank: usize, size: usize, mine: &[u8], counts: &[usize], out: &[u8]) -> Result<()> {
    let total: usize = counts.iter().sum();
    if counts.len() != size || counts[rank] != mine.len() || total != out.len() {
        return Err(Error::invalid(format!(
            "a gather of {} bytes into {} with counts {counts:?} in a group of {size}",
            mine.len(),
            out.len(),
        )));
    }
    Ok(())
}

/// Checks that a group has a member of this rank.
fn check_member(member: usize, size: usize) -> Result<()> {
    if member < size {
        Ok(())
    } else {
        Err(Error::invalid(format!(
            "member {member} of a group of {size}"
        )))
    }
}
