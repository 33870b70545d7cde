//! Members that are devices of other processes: each process has one real member, and stand-ins for the others, so that all plan the same.
//!
//! A stand-in answers what planning asks as the device of this process would, and says of itself what its process told. It computes nothing, and no
//! memory is taken for what it has.

use crate::comm::ProcessGroup;
use samite_core::{Delegate, Delegating, Device, DeviceKind, Error, MemoryInfo, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What a process tells the others of its device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct About {
    host: String,
    name: String,
    description: String,
    kind: DeviceKind,
    physical_id: Option<String>,
    free: Option<usize>,
    total: Option<usize>,
}

/// A member as all processes see it. Behind it is the device of this process.
struct Seen {
    inner: Arc<dyn Device>,
    name: String,
    about: About,
}

impl Delegate for Seen {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        self.about.description.clone()
    }

    fn kind(&self) -> DeviceKind {
        self.about.kind
    }

    fn physical_id(&self) -> Option<String> {
        let id = self.about.physical_id.as_ref()?;
        Some(format!("{}/{id}", self.about.host))
    }

    /// What was free at the beginning: all must see the same, or they would plan differently.
    fn memory(&self) -> MemoryInfo {
        MemoryInfo {
            free: self.about.free,
            total: self.about.total,
        }
    }
}

/// The members of all processes, of which `own` is this one's.
pub(crate) fn members(
    own: &Arc<dyn Device>,
    group: &ProcessGroup,
    host: &str,
) -> Result<Vec<Arc<dyn Device>>> {
    let memory = own.memory();
    let about = About {
        host: host.to_owned(),
        name: own.name().to_owned(),
        description: own.description(),
        kind: own.kind(),
        physical_id: own.physical_id(),
        free: memory.free,
        total: memory.total,
    };
    let strange = |error| Error::device("meta", format!("what processes tell each other: {error}"));
    let mine = serde_json::to_vec(&about).map_err(strange)?;
    let told = group.tell(&mine)?;
    let member = |(rank, told): (usize, &Vec<u8>)| {
        let about: About = serde_json::from_slice(told).map_err(strange)?;
        Ok(Delegating::device(Seen {
            inner: Arc::clone(own),
            name: format!("rank{rank}:{}", about.name),
            about,
        }))
    };
    told.iter().enumerate().map(member).collect()
}
