//! Builds the page: `cargo run --manifest-path examples/browser/Cargo.toml -- FOLDER`. Requires the
//! target `wasm32-unknown-unknown`.
#![forbid(unsafe_code)]

fn main() {
    #[cfg(not(target_arch = "wasm32"))]
    if let Err(error) = build::page() {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

#[cfg(not(target_arch = "wasm32"))]
mod build {
    use std::error::Error;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    const TARGET: &str = "wasm32-unknown-unknown";

    pub fn page() -> Result<(), Box<dyn Error>> {
        let mut arguments = std::env::args_os().skip(1);
        let (Some(out), None) = (arguments.next(), arguments.next()) else {
            return Err("usage: samite-browser FOLDER, where the page is to be written".into());
        };
        let (here, out) = (Path::new(env!("CARGO_MANIFEST_DIR")), PathBuf::from(out));
        // This program is in the profile's folder within the target folder.
        let program = std::env::current_exe()?;
        let target = program
            .ancestors()
            .nth(2)
            .ok_or("this program lies in no folder of cargo's")?;
        let status = Command::new("cargo")
            .args(["build", "--release", "--locked", "--lib"])
            .args(["--target", TARGET, "--manifest-path"])
            .arg(here.join("Cargo.toml"))
            .arg("--target-dir")
            .arg(target)
            // Compiles portable kernels to vector instructions.
            .env("RUSTFLAGS", "-C target-feature=+simd128")
            .status()?;
        if !status.success() {
            return Err(format!(
                "the build failed (is the target there? rustup target add {TARGET})"
            )
            .into());
        }
        std::fs::create_dir_all(&out)?;
        let module = target.join(TARGET).join("release/samite_browser.wasm");
        wasm_bindgen_cli_support::Bindgen::new()
            .input_path(module)
            .web(true)?
            .typescript(false)
            .omit_default_module_path(false)
            .generate(&out)?;
        for entry in std::fs::read_dir(here.join("page"))? {
            let entry = entry?;
            std::fs::copy(entry.path(), out.join(entry.file_name()))?;
        }
        println!("{} is built; any server of files will do", out.display());
        Ok(())
    }
}
