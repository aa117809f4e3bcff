//! The second container of the job's pod, which has the same share: the two speak by files in a folder that both have.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::probe::{Outcome, Plan, start};

/// How often a file is looked for.
const PAUSE: Duration = Duration::from_millis(100);

/// How long the other container may take, which may still have to start.
const PATIENCE: Duration = Duration::from_secs(180);

/// The folder as the first container has it. With this, the second one ends.
#[derive(Debug)]
pub struct Beside(PathBuf);

impl Beside {
    pub fn new(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// Has the second container take memory and keep it; returns what came of it.
    pub fn hold(&self, bytes: u64) -> Result<Outcome> {
        put(&self.0, "hold", &bytes.to_string())?;
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(text) = look(&self.0, "held")? {
                return serde_json::from_str(&text).context("the second container wrote nonsense");
            }
            if Instant::now() > until {
                bail!("the second container gave no answer within {} s", PATIENCE.as_secs());
            }
            sleep(PAUSE);
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if let Err(error) = put(&self.0, "done", "") {
            eprintln!("the second container cannot be told that all is done: {error:#}");
        }
    }
}

/// The second container's whole life: it takes memory when it is told to, and keeps it until all is done.
pub fn serve(folder: &Path, library: &Path) -> Result<()> {
    let mut kept = Vec::new();
    while look(folder, "done")?.is_none() {
        if kept.is_empty()
            && let Some(text) = look(folder, "hold")?
        {
            let take = text.trim().parse().context("hold: not a number of bytes")?;
            kept = start(&Plan { take, ..Plan::default() }, library, &[], 1)?;
            for process in &kept {
                put(folder, "held", &serde_json::to_string(&process.outcome)?)?;
            }
        }
        sleep(PAUSE);
    }
    Ok(())
}

/// Writes a file so that nobody sees a part of it.
fn put(folder: &Path, name: &str, content: &str) -> Result<()> {
    let partial = folder.join(format!("{name}.partial"));
    fs::write(&partial, content).with_context(|| format!("failed to write {}", partial.display()))?;
    fs::rename(&partial, folder.join(name)).with_context(|| format!("failed to rename {}", partial.display()))
}

fn look(folder: &Path, name: &str) -> Result<Option<String>> {
    let path = folder.join(name);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("failed to read {}", path.display())),
    }
}
