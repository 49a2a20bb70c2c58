exec > log
exec trl a b
trl never
