//! SHA-256 of bytes and files, as lower-case hex.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{bail, Context, Result};
use sha2::{Digest, Sha256};

pub fn bytes(data: &[u8]) -> String {
    hex(&Sha256::digest(data))
}

pub fn file(path: &Path) -> Result<String> {
    let read_error = || format!("cannot read {}", path.display());
    let mut input = File::open(path).with_context(read_error)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = input.read(&mut buffer).with_context(read_error)?;
        if n == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..n]);
    }
}

/// Fails unless the file has this SHA-256; `what_to_do` ends the message.
pub fn expect_file(path: &Path, want: &str, what_to_do: &str) -> Result<()> {
    let found = file(path)?;
    if found != want {
        bail!(
            "{}: wrong contents\n  expected SHA-256 {want}\n  found    SHA-256 {found}\n{what_to_do}",
            path.display()
        );
    }
    Ok(())
}

pub fn is_sha256(text: &str) -> bool {
    text.len() == 64
        && text
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_abc_is_the_published_one() {
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(bytes(b"abc"), abc);
        assert!(is_sha256(abc));
        assert!(!is_sha256(&abc.to_uppercase()));
        assert!(!is_sha256("ba78"));
    }
}
