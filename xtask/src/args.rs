//! Arguments that are handed on to another program.

/// True if `--name value` or `--name=value` is among them.
pub fn has(args: &[String], name: &str) -> bool {
    args.iter().any(|a| {
        a == name
            || a.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('='))
    })
}

/// Removes the switch `name`, wherever it stands; true if it was there.
pub fn take_switch(args: &mut Vec<String>, name: &str) -> bool {
    let before = args.len();
    args.retain(|a| a != name);
    args.len() < before
}

/// Adds `name value` unless `name` is given already.
pub fn default(args: &mut Vec<String>, name: &str, value: &std::path::Path) {
    if !has(args, name) {
        args.push(name.to_owned());
        args.push(value.to_string_lossy().into_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn args(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn both_spellings_of_an_option_are_seen_and_longer_names_are_not() {
        assert!(has(&args("--target x"), "--target"));
        assert!(has(&args("--target=x"), "--target"));
        assert!(!has(&args("--target-dtype f32"), "--target"));
    }

    #[test]
    fn a_default_never_overrides_what_was_given() {
        let mut given = args("--target=x");
        default(&mut given, "--target", Path::new("y"));
        default(&mut given, "--draft", Path::new("z"));
        assert_eq!(given, args("--target=x --draft z"));
    }

    #[test]
    fn a_switch_is_taken_out_wherever_it_stands() {
        let mut given = args("--a 1 --serve --b");
        assert!(take_switch(&mut given, "--serve"));
        assert!(!take_switch(&mut given, "--serve"));
        assert_eq!(given, args("--a 1 --b"));
    }
}
