//! Other sessions of the same token without a connection. Their clients may be dead, or may return.
//! They make room if a session needs memory.

use super::host::Host;
use super::lock;
use std::sync::Weak;
use std::time::Duration;

/// Time limit for freeing the memory of a session that was ended.
const PATIENCE: Duration = Duration::from_secs(5);

/// Access of a session to others of its token.
pub(super) struct Siblings {
    pub host: Weak<Host>,
    /// Name of the token.
    pub owner: String,
    /// The session itself, which may also have lost its connection.
    pub own: [u8; 16],
}

impl Siblings {
    /// Returns the bytes that ending all sessions without a connection would free.
    pub fn bytes(&self) -> usize {
        let Some(host) = self.host.upgrade() else {
            return 0;
        };
        let sessions = lock(&host.sessions);
        let others = sessions
            .values()
            .filter(|session| session.owner == self.owner && session.name != self.own);
        let orphans = others.filter(|session| session.left_since().is_some());
        orphans.map(|session| session.memory.taken()).sum()
    }

    /// Ends the session that has been without a connection for the longest time, and waits until
    /// its memory is free. Returns whether there was one.
    pub fn end_one(&self) -> bool {
        let Some(host) = self.host.upgrade() else {
            return false;
        };
        let Some(session) = host.end_orphan(&mut lock(&host.sessions), &self.owner, Some(self.own))
        else {
            return false;
        };
        let alive = Weak::clone(&session.alive);
        drop(session);
        let end = host.environment.now() + PATIENCE;
        while alive.strong_count() > 0 && host.environment.now() < end {
            host.environment.pause(Duration::from_millis(2));
        }
        true
    }
}
