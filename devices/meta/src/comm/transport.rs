//! Transports: carry bytes between processes.

use samite_core::Result;

/// One process's end of a connection between all members of a group.
///
/// It has a single operation: sending the data of each member to all. No method blocks, so the
/// caller decides how long to wait.
pub trait Transport: Send {
    /// Returns a name for users: a library and its version.
    fn name(&self) -> String;

    /// Returns the rank of this process.
    fn rank(&self) -> usize;

    /// Returns the number of processes.
    fn size(&self) -> usize;

    /// Starts to gather the data of all members. The n-th call of a member belongs to the n-th call
    /// of every other one. The data of this member is `head` followed by `body`; `lens` are the
    /// sizes in bytes of all members' data.
    ///
    /// # Errors
    /// Returns an error if a gather is in progress or cannot start.
    fn begin(&mut self, head: &[u8], body: &[u8], lens: &[usize]) -> Result<()>;

    /// Returns whether the gather is complete. Does not block.
    ///
    /// # Errors
    /// Returns an error if it can never complete.
    fn test(&mut self) -> Result<bool>;

    /// Announces to the others that this process waits in the current gather, for transports that
    /// cannot tell who has arrived. Called once in a gather that takes long.
    fn call_out(&mut self) {}

    /// Returns the ranks that have not arrived at the current gather, as far as known. Called when
    /// the deadline is over. No gather is possible afterwards.
    fn missing(&mut self) -> Vec<usize> {
        Vec::new()
    }

    /// Returns the data of all members, concatenated in the order of their ranks. Valid from when
    /// [`test`](Transport::test) returns true until the next `begin`.
    fn gathered(&self) -> &[u8];

    /// Leaves the group together with all others.
    ///
    /// # Errors
    /// Returns an error if that fails.
    fn finish(&mut self) -> Result<()>;

    /// Ends all processes including this one, if possible, because one cannot continue.
    fn abort(&mut self, exit_code: i32);
}
