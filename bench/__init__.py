"""What a person runs: the command line `mla`, or `python -m bench`. What is right and wrong is decided in reference.py.

cli.py says what can be asked for, with options.py and names.py; commands/ has a file for each command. checks/ is what
`mla verify` looks for, contest/ whom `mla compare` times and how, show/ what is printed, drawn and written. A
submission runs in a process of its own: worker/. cases.py has the cases, traffic.py the bytes that they move and the
time that memory needs for it, environment.py and versions.py say what something was run on, requirements.py what is
missing.
"""

__version__ = "0.1.0"
