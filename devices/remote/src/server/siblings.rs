//! Other sessions of the same token that have no connection: their clients were killed perhaps, or come back. They make room where a session needs it.

use super::host::Host;
use super::lock;
use std::sync::Weak;
use std::time::Duration;

/// How long it may take until the memory of a session that was ended is free.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a session knows of others of its token.
pub(super) struct Siblings {
    pub host: Weak<Host>,
    /// Names the token.
    pub owner: String,
    /// The session itself, which may have lost its connection, too.
    pub own: [u8; 16],
}

impl Siblings {
    /// Bytes that would be free if all of them that have no connection ended.
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

    /// Ends the one that has been without a connection for the longest time, and waits until its memory is free. Whether there was one.
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
        let end = host.outside.now() + PATIENCE;
        while alive.strong_count() > 0 && host.outside.now() < end {
            host.outside.pause(Duration::from_millis(2));
        }
        true
    }
}
