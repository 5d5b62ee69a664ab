"""What every operation is made of: a *problem* is what is asked, a *rung* one way to do it, a *config* the compile-time
choices of that way, a *ladder* the rungs of one operation, and the *card* what they run on."""
