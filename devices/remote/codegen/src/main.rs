//! Generates Rust from the `.proto` file. It is not a build script: the output changes only with
//! that file, and its dependencies would double the build time of the protocol.
//!
//! `cargo run --manifest-path devices/remote/codegen/Cargo.toml`, with `--check` to compare only.

use std::error::Error;
use std::path::Path;

const HEADER: &str = "// Made by devices/remote/codegen from proto/samite.proto. Change that file, and run it again.\n\n";

fn main() -> Result<(), Box<dyn Error>> {
    let remote = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let made = tempfile()?;
    let files = protox::compile(["samite.proto"], [remote.join("proto")])?;
    tonic_prost_build::configure()
        .bytes(".samite.remote.v1")
        .out_dir(&made)
        .compile_fds(files)?;
    let text = std::fs::read_to_string(made.join("samite.remote.v1.rs"))?;
    std::fs::remove_dir_all(&made)?;
    let text = format!("{HEADER}{text}");
    let file = remote.join("src/proto.rs");
    if std::env::args().any(|flag| flag == "--check") {
        if std::fs::read_to_string(&file)? != text {
            return Err(
                "src/proto.rs is not what proto/samite.proto gives: run this without --check"
                    .into(),
            );
        }
        return Ok(());
    }
    Ok(std::fs::write(file, text)?)
}

/// A folder for what is made.
fn tempfile() -> std::io::Result<std::path::PathBuf> {
    let folder = std::env::temp_dir().join(format!("samite-codegen-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}
