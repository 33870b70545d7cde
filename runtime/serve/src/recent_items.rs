//! Output items of recent responses, for clients that send their identifiers instead of the items.

use crate::app::lock;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;

/// Items of each owner, in bounded memory. An owner sees its own items only.
#[derive(Debug, Default)]
pub struct RecentItems(Mutex<BTreeMap<u64, OwnedItems>>);

/// Items of one owner.
#[derive(Debug, Default)]
struct OwnedItems {
    /// Identifiers, the oldest first.
    ids: VecDeque<String>,
    /// JSON by identifier.
    texts: BTreeMap<String, String>,
    bytes: usize,
}

impl OwnedItems {
    /// Bytes of an item besides its JSON.
    const CONSTANT: usize = 256;

    fn add(&mut self, id: &str, text: String) {
        self.remove(id);
        self.bytes += Self::CONSTANT + text.len();
        self.ids.push_back(id.to_owned());
        self.texts.insert(id.to_owned(), text);
    }

    fn remove(&mut self, id: &str) {
        if let Some(text) = self.texts.remove(id) {
            self.bytes -= Self::CONSTANT + text.len();
            self.ids.retain(|known| known != id);
        }
    }

    fn remove_oldest(&mut self) {
        if let Some(text) = self.ids.pop_front().and_then(|id| self.texts.remove(&id)) {
            self.bytes -= Self::CONSTANT + text.len();
        }
    }
}

impl RecentItems {
    /// Maximum number of bytes of all items.
    const MAX_BYTES: usize = 16 << 20;

    /// Stores items. The oldest ones of the owner with the most bytes make room.
    pub fn store(&self, owner: u64, items: impl Iterator<Item = Value>) {
        let items =
            items.filter_map(|item| Some((item["id"].as_str()?.to_owned(), item.to_string())));
        let items: Vec<_> = items.collect();
        let mut owners = lock(&self.0);
        for (id, text) in items {
            owners.entry(owner).or_default().add(&id, text);
        }
        while owners.values().map(|one| one.bytes).sum::<usize>() > Self::MAX_BYTES {
            let Some(largest) = owners.values_mut().max_by_key(|one| one.bytes) else {
                break;
            };
            largest.remove_oldest();
        }
        owners.retain(|_, one| !one.ids.is_empty());
    }

    /// Returns an item of an owner.
    pub fn find(&self, owner: u64, id: &str) -> Option<Value> {
        let text = lock(&self.0).get(&owner)?.texts.get(id)?.clone();
        serde_json::from_str(&text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn items_are_kept_per_owner_in_bounded_memory() {
        let items = RecentItems::default();
        let item = |number: usize| json!({"id": format!("msg_{number}"), "text": "x".repeat(1000)});
        // An identifier that comes again replaces its item.
        let store = |owner, list: &[Value]| items.store(owner, list.iter().cloned());
        store(1, &[json!({"id": "msg_0"}), item(0)]);
        store(1, &[json!({"text": "without an identifier"})]);
        assert_eq!(items.find(1, "msg_0"), Some(item(0)));
        assert_eq!(items.find(2, "msg_0"), None);
        let most = RecentItems::MAX_BYTES / 1000;
        for number in 0..most {
            store(2, &[item(number)]);
        }
        // Only the owner with the most items loses its oldest ones.
        assert_eq!(items.find(1, "msg_0"), Some(item(0)));
        assert_eq!(items.find(2, "msg_0"), None);
        assert!(items.find(2, &format!("msg_{}", most - 1)).is_some());
        let bytes: usize = lock(&items.0).values().map(|one| one.bytes).sum();
        assert!(
            (RecentItems::MAX_BYTES - 2000..=RecentItems::MAX_BYTES).contains(&bytes),
            "{bytes}"
        );
    }
}
