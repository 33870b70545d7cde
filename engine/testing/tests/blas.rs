//! Compares the device with the reference, where a library is installed.

use samite_blas::BlasBackend;
use samite_core::Backend;
use samite_testing::{run_suite, skipped};

#[test]
fn products_agree_with_the_reference() {
    let backend = BlasBackend::default();
    let Some(device) = backend.devices().first() else {
        let tried = backend.rejected();
        assert!(!tried.is_empty(), "no device, and no word about why");
        skipped(format_args!("no CBLAS library on this machine: {tried:?}"));
        return;
    };
    let report = run_suite(device, None, &mut |_| {});
    assert!(report.is_success(), "{report}");
    assert!(report.passed() >= 50, "{report}");
    assert_eq!(
        report
            .ops
            .iter()
            .filter(|(_, counts)| counts.passed > 0)
            .map(|(op, _)| op.as_str())
            .collect::<Vec<_>>(),
        ["mul_mat"]
    );
    println!("{report}");
}

#[test]
fn a_wrong_library_path_only_rejects_the_device() {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "--nocapture",
            "child_process_with_a_wrong_library_path",
        ])
        .env(samite_blas::PATH_VARIABLE, "/nonexistent/libblas.so")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}

/// Run by the test above with the variable set; without it, does nothing.
#[test]
fn child_process_with_a_wrong_library_path() {
    if std::env::var(samite_blas::PATH_VARIABLE).is_ok_and(|path| path.starts_with("/nonexistent"))
    {
        let backend = BlasBackend::default();
        assert!(backend.devices().is_empty());
        let rejected = &backend.rejected()[0];
        assert!(rejected.what.contains("/nonexistent/libblas.so"));
        assert!(!rejected.why.is_empty() && rejected.named);
    }
}
