//! Checks that the planted bugs in `mistakes/` still apply to the sources.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_testing::skipped;
use std::path::Path;
use std::process::Command;

#[test]
fn every_planted_bug_is_described_and_applies() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let has_git = Command::new("git").arg("--version").output().is_ok();
    if !root.join(".git").exists() || !has_git {
        return skipped("no git repository: patches are not tried");
    }
    let mut count = 0;
    for entry in std::fs::read_dir(root.join("runtime/sim/mistakes")).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_none_or(|extension| extension != "patch")
        {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let first = text.lines().next().unwrap();
        assert!(first.ends_with('.'), "{}: {first}", path.display());
        let git = Command::new("git")
            .args(["apply", "--check"])
            .arg(&path)
            .current_dir(&root)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&git.stderr);
        assert!(git.status.success(), "{}: {said}", path.display());
        count += 1;
    }
    assert!(count >= 30, "{count}");
}
