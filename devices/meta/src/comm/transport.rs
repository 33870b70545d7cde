//! What carries bytes between processes.

use samite_core::Result;

/// One process's end of a connection between all members of a group.
///
/// It does one thing: what each member has goes to all. Nothing in it waits, so that who uses it decides for how long.
pub trait Transport: Send {
    /// What it is, for people: a library and its version.
    fn name(&self) -> String;

    /// The number of this process.
    fn rank(&self) -> usize;

    /// How many processes there are.
    fn size(&self) -> usize;

    /// Begins to gather what all have. The n-th call of a member belongs to the n-th call of every other one. This member has `head` and `body`, one
    /// behind the other; `lens` says for each member how many bytes it has.
    ///
    /// # Errors
    /// If a gathering is under way, or cannot begin.
    fn begin(&mut self, head: &[u8], body: &[u8], lens: &[usize]) -> Result<()>;

    /// Whether everything is here. Returns at once.
    ///
    /// # Errors
    /// If it will never be.
    fn test(&mut self) -> Result<bool>;

    /// Tells the others that this process waits in the gathering that is under way, where a transport could not know otherwise who has come to it. Called once
    /// in a gathering that takes long.
    fn call_out(&mut self) {}

    /// Who has not come to the gathering that is under way, as far as that is known: when a deadline is over. Nothing is gathered afterwards.
    fn missing(&mut self) -> Vec<usize> {
        Vec::new()
    }

    /// What all had, one behind the other in the members' order: when [`test`](Transport::test) has said so, until the next beginning.
    fn gathered(&self) -> &[u8];

    /// Says farewell, when all do.
    ///
    /// # Errors
    /// If that fails.
    fn finish(&mut self) -> Result<()>;

    /// Ends all processes, this one too, where that is possible: one cannot go on.
    fn abort(&mut self, exit_code: i32);
}
