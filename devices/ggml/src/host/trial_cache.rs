//! Disk cache of verdicts on plugins' devices.
//!
//! They apply to a file with the same size and modification time, and to one version of samite.

use crate::abi::Version;
use samite_disk_cache::{CacheFile, cache_folder};
use std::fmt::Write;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// Identity of each device, with its failure if it has one.
type Devices = Vec<(String, Option<String>)>;

/// Cache file of the verdicts on one plugin.
pub struct TrialCache(CacheFile);

impl TrialCache {
    /// Returns the verdicts on the plugin at `path`, if there is a cache folder.
    pub fn for_plugin(path: &Path) -> Option<Self> {
        Self::in_folder(&cache_folder()?, path)
    }

    pub(super) fn in_folder(folder: &Path, path: &Path) -> Option<Self> {
        let about = std::fs::metadata(path).ok()?;
        let changed = about.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        let name = format!("plugin-{}", path.file_stem()?.to_string_lossy());
        let (len, time) = (about.len(), changed.as_nanos());
        let subject = format!("{len} {time} {}", path.display());
        Some(TrialCache(CacheFile::new(folder, &name, path, &subject)))
    }

    /// Returns the release as which a plugin without `libggml-base` works, and the verdicts, if
    /// they apply to the current file.
    pub fn read(&self) -> Option<(Option<Version>, Devices)> {
        let text = self.0.text()?;
        let verdict = |line: &str| {
            let (identity, doubt) = line.split_once('\t')?;
            let doubt = (!doubt.is_empty()).then(|| doubt.to_owned());
            Some((identity.to_owned(), doubt))
        };
        let (release, rest) = text.split_once('\n')?;
        let release = match release {
            "" => None,
            release => Some(Version::of_release(release).ok()?),
        };
        Some((release, rest.lines().map(verdict).collect::<Option<_>>()?))
    }

    /// Stores verdicts. If that fails, the next run determines them again.
    pub fn write(&self, release: Option<Version>, devices: &Devices) {
        let release = release.map(|release| release.to_string());
        let mut text = release.unwrap_or_default() + "\n";
        for (identity, doubt) in devices {
            let doubt = doubt.as_deref().unwrap_or_default();
            let _ = writeln!(text, "{}\t{doubt}", identity.replace('\t', " "));
        }
        self.0.write(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_cached_until_the_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let plugin = folder.path().join("libggml-x.so");
        let kept = folder.path().join("kept");
        assert!(TrialCache::in_folder(&kept, &plugin).is_none(), "no file");
        std::fs::write(&plugin, "1").unwrap();
        let trial_cache = || TrialCache::in_folder(&kept, &plugin).unwrap();
        assert_eq!(trial_cache().read(), None);
        let devices = vec![
            ("A one".to_owned(), None),
            ("B".to_owned(), Some("no".to_owned())),
        ];
        let release = Some(Version::V28);
        trial_cache().write(release, &devices);
        assert_eq!(trial_cache().read(), Some((release, devices.clone())));
        // A plugin of the same name in another folder does not replace the verdicts.
        let other = folder.path().join("other");
        std::fs::create_dir(&other).unwrap();
        std::fs::write(other.join("libggml-x.so"), "1").unwrap();
        let other = TrialCache::in_folder(&kept, &other.join("libggml-x.so")).unwrap();
        other.write(None, &Vec::new());
        assert_eq!(other.read(), Some((None, Vec::new())));
        assert_eq!(trial_cache().read(), Some((release, devices.clone())));
        assert_eq!(std::fs::read_dir(&kept).unwrap().count(), 2);
        let time = std::fs::metadata(&plugin).unwrap().modified().unwrap();
        std::fs::write(&plugin, "12").unwrap();
        let file = std::fs::File::options().append(true).open(&plugin).unwrap();
        file.set_modified(time).unwrap();
        assert_eq!(trial_cache().read(), None, "another size");
        trial_cache().write(release, &devices);
        file.set_modified(UNIX_EPOCH).unwrap();
        assert_eq!(trial_cache().read(), None, "another time");
    }
}
