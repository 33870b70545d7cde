//! What members exchange, and how they wait for each other.
//!
//! A [`Communicator`] is one member's end of a group. All members make the same calls in the same order; each call is a meeting of all. Sums are made in
//! the order of the members, so that all get the same bits. A group that something failed in is *poisoned*: every call fails, also those that are
//! waiting, until the group begins anew.

mod meeting;
pub mod played;
mod process;
mod threads;
mod transport;

pub use process::{ProcessGroup, ProcessOptions};
pub(crate) use threads::grow;
pub use threads::{ThreadCommunicator, ThreadGroup};
pub use transport::Transport;

use samite_core::{Error, Result};

/// One member's end of a group.
pub trait Communicator: Send {
    /// The member's number.
    fn rank(&self) -> usize;

    /// How many members there are.
    fn size(&self) -> usize;

    /// Replaces `x` by the sum of what all members have, the same bits for all.
    ///
    /// # Errors
    /// If another member called something else, failed, or did not come in time. The group is poisoned then.
    fn all_reduce(&mut self, x: &mut [f32]) -> Result<()>;

    /// Puts what all members have, one behind the other in the members' order, into `out`. `counts` are their bytes.
    ///
    /// # Errors
    /// As [`all_reduce`](Communicator::all_reduce).
    fn all_gather(&mut self, mine: &[u8], counts: &[usize], out: &mut [u8]) -> Result<()>;

    /// Replaces `bytes` by those of member `root`.
    ///
    /// # Errors
    /// As [`all_reduce`](Communicator::all_reduce).
    fn broadcast(&mut self, root: usize, bytes: &mut [u8]) -> Result<()>;

    /// Waits for all.
    ///
    /// # Errors
    /// As [`all_reduce`](Communicator::all_reduce).
    fn barrier(&mut self) -> Result<()>;

    /// Poisons the group: this member cannot go on.
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

/// Checks that a group has a member of this number.
fn check_member(member: usize, size: usize) -> Result<()> {
    match member < size {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "member {member} of a group of {size}"
        ))),
    }
}
